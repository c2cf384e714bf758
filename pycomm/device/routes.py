"""On which stream a call goes, and which others it is ordered with; found before it is sent."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pycomm.device_buffers import DeviceBuffer
from pycomm.errors import ArgumentValueError, CUDAError
from pycomm.streams import PER_THREAD, as_stream, capturing

__all__ = ["Route", "route_of"]


class Route(NamedTuple):
    """The way of one call.

    Attributes
    ----------
    given : int
        The stream that gets it.
    before, after : tuple of int
        The streams that it waits for, and those that wait for it.
    keep : tuple
        What must live until it is done.
    captured : bool
        Whether the stream records a graph.
    """

    given: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    keep: tuple[Any, ...]
    captured: bool


def route_of(
    buffers: Sequence[DeviceBuffer],
    written: Sequence[DeviceBuffer],
    stream: Any,
    own: Callable[[], int],
) -> Route:
    """Return the route of a call.

    Parameters
    ----------
    buffers, written : sequence of DeviceBuffer
        All of its memory, and that which it writes.
    stream : object, optional
        What the caller asks for; by default the stream of the first buffer.
    own : callable
        Returns a stream of the communicator's own.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If there is no such stream.
    """
    handle = buffers[0].stream if stream is None else as_stream(stream)
    # NCCL starts things from threads of its own, where this name means another stream.
    given = own() if handle == PER_THREAD else handle
    try:
        captured = capturing(given)
    except CUDAError as error:
        raise ArgumentValueError(
            f"{given:#x} is no stream that the driver knows: was it destroyed? ({error})"
        ) from error
    known = {handle, given}
    # What is captured has no past: a graph runs when it is launched.
    others = () if captured else _streams(one for one in buffers if one.produced)
    before = tuple(one for one in others if one not in known)
    # Their owners free memory in the order of their own stream, which may be ahead; and of memory
    # that came by DLPack nobody knows in which order it is freed.
    kept = bool(before) or any(one.held is not None for one in buffers)
    keep = tuple(item for one in buffers for item in (one.owner, one.held)) if kept else ()
    after: tuple[int, ...] = ()
    if stream is None and not captured:
        theirs = _streams(written)
        after = tuple(one for one in theirs if one not in known)
    if given != handle:
        before, after = (*before, handle), (*after, handle)
    return Route(given, before, after, keep, captured)


def _streams(buffers: Iterable[DeviceBuffer]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(one.stream for one in buffers))

"""What a communicator has beyond operations: registered memory, and a device."""

import math
import operator
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pycomm.dtypes import as_dtype
from pycomm.engine import Engine
from pycomm.errors import ArgumentTypeError, ArgumentValueError
from pycomm.messages import Messages
from pycomm.transports.shared import REGIONS

if TYPE_CHECKING:
    from pycomm.device.side import DeviceSide

__all__ = ["Resources"]


class Resources(Messages):
    """empty, group, and what serves device arrays; see `Communicator`."""

    _wanted: int | None = None

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        # Weak: the engine is not to keep alive what warns when it is dropped.
        engine.make_device = weakref.WeakMethod(self._make_device)

    def empty(self, shape: Any, dtype: Any = "float32", *, device: str = "host") -> Any:
        """Return a registered array: memory that the ranks of this host, or NCCL, can map.

        On the host: no communication. Collectives between ranks of one host go straight through
        such memory, and through contiguous views of it. It is freed with the last view of it; that
        of a peer lives as long as the peer's array. Where the system cannot share memory without a
        name (memfd), this is an ordinary array.

        On a device: collective over all ranks, with equal sizes. Memory of NCCL's, registered as a
        window, that its fastest algorithms need; it is freed with the communicator.

        Parameters
        ----------
        shape : int or tuple of int
            Its shape. The values are zeros.
        dtype : str or numpy.dtype
            Its element type, one that `pycomm` knows.
        device : str
            ``"host"``, or ``"cuda"`` for the device that this communicator works on.

        Returns
        -------
        numpy.ndarray or DeviceArray
            A new C-contiguous array.

        Raises
        ------
        MemoryError
            If there is less memory than that, with the numbers, before any of it is used; or if
            no file descriptor is left: an array above 64 KiB takes one.
        ArgumentTypeError, ArgumentValueError
            If there is no such dtype or shape.
        """
        row = as_dtype(dtype)
        kind = row.numpy
        if device not in ("host", "cuda"):
            raise ArgumentValueError(f"device is 'host' or 'cuda', not {device!r}")
        try:
            sizes = (
                (operator.index(shape),)
                if not isinstance(shape, Iterable)
                else tuple(operator.index(length) for length in shape)
            )
        except TypeError:
            raise ArgumentTypeError(f"a shape is whole numbers, not {shape!r}") from None
        if any(length < 0 for length in sizes):
            raise ArgumentValueError(f"a shape has no negative lengths: {shape!r}")
        nbytes = math.prod(sizes) * kind.itemsize
        if device == "cuda":
            return self._side.empty(sizes, row, nbytes)
        try:
            octets = REGIONS.allocate(nbytes)
        except OSError:
            octets = np.zeros(nbytes, np.uint8)
        try:
            return octets.view(kind).reshape(sizes)
        except ValueError as error:  # too many dimensions, or too long ones beside an empty one
            raise ArgumentValueError(f"no array has the shape {shape!r}: {error}") from None

    zeros = empty

    def _make_device(self) -> "DeviceSide":
        from pycomm.device.side import DeviceSide  # only now: it loads what belongs to CUDA

        local = (self.local_rank, self.local_size)
        own = weakref.WeakMethod(self.all_gather_object)

        def gather(told: Any, seconds: float) -> list[Any]:
            method = own()
            assert method is not None
            return method(told, timeout=seconds)

        return DeviceSide(self._engine, gather, self._wanted, local)

    @property
    def _side(self) -> "DeviceSide":
        return cast("DeviceSide", self._engine.on_device())

    def group(self) -> AbstractContextManager[None]:
        """Return a ``with`` scope whose calls on device arrays NCCL starts together, at its end.

        What several sends and receives between the same ranks need, and what saves launches. Only
        what NCCL does itself belongs there; the results are there after its end.
        """
        return self._side.group()

    def _over_nccl(self, transport: Any) -> None:
        """Take over the NCCL communicator of a transport that is nothing else."""
        comm = getattr(transport, "comm", None)
        if comm is None:
            return
        from pycomm.device.together import check_outside

        self._engine.guard = partial(check_outside, None)
        try:
            self._side.use(comm)
        except BaseException:
            comm.abort()
            raise

    @property
    def saturated(self) -> int:
        """How many finite values were too large for the codecs of this rank's calls so far."""
        side = self._engine.device
        return self._engine.choices.saturated + (0 if side is None else side.saturated)

    @property
    def local_rank(self) -> int:
        """The number of this rank among the ranks of its host, in rank order; no communication."""
        return self._host_ranks.index(self._rank)

    @property
    def local_size(self) -> int:
        """The number of ranks on this host; no communication."""
        return len(self._host_ranks)

    @property
    def _host_ranks(self) -> list[int]:
        hosts = self._engine.transport.hosts
        return [rank for rank in range(self._size) if hosts[rank] == hosts[self._rank]]

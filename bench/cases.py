"""One record a collective: counts, bandwidth, where its arrays lie, and how to call it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from numpy.typing import NDArray

if TYPE_CHECKING:
    from pycomm import Communicator, Plan

__all__ = [
    "CASES",
    "Case",
    "Counts",
    "Placement",
    "bind",
    "bus_factor",
    "find_case",
    "place",
    "planned",
]

Array = NDArray[Any]

# Counts a rank are rounded down to this many bytes where a buffer is cut into one part a rank.
PART_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Counts:
    """Elements in a rank's send and receive buffer, and the count that the call is about."""

    send: int
    recv: int
    param: int


@dataclass(frozen=True, slots=True)
class Case:
    """What the benchmark has to know about one collective.

    Attributes
    ----------
    name : str
        The method of `pycomm.Communicator`.
    reduces, rooted : bool
        Whether it takes ``op`` and ``root``.
    send_parts, recv_parts : bool
        Whether that buffer holds one part for each rank.
    in_place : bool
        Whether it has an in-place form.
    moves : bool
        Whether it moves data at all.
    links : callable or None
        From the number of ranks to bus bandwidth over algorithm bandwidth: the share of the bytes
        that has to cross the busiest link. None: all of them, 1.
    aliases : tuple of str
        Other spellings accepted on the command line.
    """

    name: str
    reduces: bool = False
    rooted: bool = False
    send_parts: bool = False
    recv_parts: bool = False
    in_place: bool = True
    moves: bool = True
    links: Callable[[int], float] | None = None
    aliases: tuple[str, ...] = ()

    def counts(self, nbytes: int, itemsize: int, size: int) -> Counts:
        """Return the counts of a rank for a largest buffer of `nbytes` among `size` ranks."""
        whole = nbytes // itemsize if self.moves else 0
        if not (self.send_parts or self.recv_parts):
            return Counts(whole, whole, whole)
        step = max(1, PART_ALIGNMENT // itemsize)
        part = whole // size // step * step
        return Counts(
            part * size if self.send_parts else part,
            part * size if self.recv_parts else part,
            part,
        )


def _all_but_mine(size: int) -> float:
    return (size - 1) / size


def _there_and_back(size: int) -> float:
    return 2 * (size - 1) / size


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("all_reduce", reduces=True, links=_there_and_back),
        Case("reduce_scatter", reduces=True, send_parts=True, links=_all_but_mine),
        Case("all_gather", recv_parts=True, links=_all_but_mine),
        Case("broadcast", rooted=True, aliases=("bcast",)),
        Case("reduce", reduces=True, rooted=True),
        Case("gather", rooted=True, recv_parts=True, links=_all_but_mine),
        Case("scatter", rooted=True, send_parts=True, links=_all_but_mine),
        Case("all_to_all", send_parts=True, recv_parts=True, links=_all_but_mine),
        Case("send_recv", in_place=False),
        Case("barrier", in_place=False, moves=False),
    )
}


def find_case(name: str) -> Case | None:
    """Return the collective of that name in pycomm's, MPI's or nccl-tests' spelling, else None."""
    wanted = name.lower().replace("-", "").replace("_", "").removesuffix("perf")
    for case in CASES.values():
        if wanted in (case.name.replace("_", ""), *case.aliases):
            return case
    return None


def bus_factor(case: Case, size: int) -> float:
    """Return bus bandwidth over algorithm bandwidth; 0 for one rank, where nothing is crossed."""
    if size == 1 or not case.moves:
        return 0.0
    return case.links(size) if case.links is not None else 1.0


@dataclass(frozen=True, slots=True)
class Placement:
    """The arrays of one call on one rank.

    Attributes
    ----------
    x, out : numpy.ndarray or None
        The two array arguments of the call.
    source : numpy.ndarray or None
        Where this rank's input is to be written before the call; None if it has none.
    result : numpy.ndarray or None
        Where the output is to be read after the call; None if this rank gets none.
    """

    x: Array | None
    out: Array | None
    source: Array | None
    result: Array | None


def place(
    case: Case, rank: int, root: int, counts: Counts, send: Array, recv: Array, *, in_place: bool
) -> Placement:
    """Return the arrays for a call, cut from two buffers as nccl-tests cuts them.

    Parameters
    ----------
    case : Case
        The collective.
    rank, root : int
        This rank and the root (ignored by collectives that have none).
    counts : Counts
        Elements of the buffers.
    send, recv : numpy.ndarray
        Buffers of at least as many elements.
    in_place : bool
        Whether input and output share memory: the same buffer, or this rank's part of the larger
        one where the two differ in size.
    """
    a, b = send[: counts.send], recv[: counts.recv]
    own = slice(rank * counts.param, (rank + 1) * counts.param)
    at_root = not case.rooted or rank == root
    if not at_root and (case.send_parts or case.recv_parts):
        # Away from the root a gather has only an input, a scatter only an output.
        return Placement(a, None, a, None) if case.recv_parts else Placement(None, b, None, b)
    result_here = at_root or case.name == "broadcast"
    source_here = at_root or case.reduces
    if not in_place:
        return Placement(a, b, a if source_here else None, b if result_here else None)
    if case.send_parts and not case.recv_parts:
        x, out, source, result = a, a[own], a, a[own]
    elif case.recv_parts and not case.send_parts:
        x, out, source, result = b[own], b, b[own], b
    elif case.send_parts:
        x, out, source, result = b, b, b, b
    else:
        return Placement(b, None, b if source_here else None, b if result_here else None)
    return Placement(x, out, source, result)


def bind(
    case: Case,
    comm: "Communicator",
    placement: Placement,
    *,
    op: Any = None,
    root: int = 0,
    algorithm: str | None = None,
    **encoding: Any,
) -> Callable[..., Any]:
    """Return the call of `case` on `placement` as a function without required arguments.

    `encoding` is ``compression`` and ``key`` where messages are to be encoded.
    """
    method = getattr(comm, case.name)
    options = _options(case, op, root, algorithm) | encoding
    if case.name == "send_recv":
        options["dest"] = (comm.rank + 1) % comm.size
        options["source"] = (comm.rank - 1) % comm.size
    if not case.moves:
        return partial(method, **options)
    return partial(method, placement.x, placement.out, **options)


def planned(
    case: Case,
    comm: "Communicator",
    placement: Placement,
    *,
    op: Any = None,
    root: int = 0,
    algorithm: str | None = None,
    **encoding: Any,
) -> "Plan":
    """Return the plan of the same call; of all but send_recv."""
    options = _options(case, op, root, algorithm) | encoding
    arrays = (placement.x, placement.out) if case.moves else ()
    return cast("Plan", comm.plan(case.name, *arrays, **options))


def _options(case: Case, op: Any, root: int, algorithm: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if case.reduces:
        options["op"] = op
    if case.rooted:
        options["root"] = root
    if algorithm is not None:
        options["algorithm"] = algorithm
    return options

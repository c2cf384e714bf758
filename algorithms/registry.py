"""The algorithms by name, and the place where users add theirs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any, Protocol
from weakref import WeakSet

from pycomm.algorithms import bruck, direct, hierarchical, recursive, ring, tree
from pycomm.algorithms.hierarchical import hosts_of
from pycomm.algorithms.matching import many_objects
from pycomm.algorithms.schedule import COLLECTIVES, ROOTED, Schedule
from pycomm.algorithms.verify import verify
from pycomm.errors import ArgumentTypeError, ArgumentValueError, ScheduleError

__all__ = [
    "RESERVED",
    "SHARED",
    "Algorithm",
    "algorithm_of",
    "names",
    "register",
    "unregister",
    "watch",
]

#: Names of the ways through shared memory: for any array, or where all arrays are registered.
SHARED = ("shared", "registered")
#: What ``algorithm=`` takes beside the names of algorithms.
RESERVED = ("auto", "native", *SHARED)

# Bytes of a segment that ranks hand on: long enough to hide what a message costs.
_RELAYED = 512 << 10
# Schedules of a user are proved right before they run, up to this many ranks.
_VERIFIED_RANKS = 128


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm for one collective.

    Attributes
    ----------
    collective, name : str
        What it does, and what it is called in ``algorithm=``.
    build : callable
        ``build(rank, size)``, ``build(rank, size, root)`` for collectives with a root; one more
        argument at the end, the groups, if `grouped`.
    grouped : bool
        Whether it takes the groups of ranks that share a host, see
        `pycomm.algorithms.hierarchical`.
    rounds_once : bool
        Whether every reduction combines the contributions of all ranks at once.
    relays : bool
        Whether data goes through ranks on its way, so that it flows best in many segments: chains
        and trees of long messages, and the stages of a hierarchy on several hosts.
    weighted : bool
        Whether `build` takes ``bandwidths=``.
    trusted : bool
        Whether its schedules need no proof before they run.
    """

    collective: str
    name: str
    build: Callable[..., Schedule]
    grouped: bool = False
    rounds_once: bool = False
    relays: bool = False
    weighted: bool = False
    trusted: bool = False
    _proved: set[Any] = field(default_factory=set, init=False, compare=False, repr=False)

    def segment_of(self, longest: int, hosts: int) -> int:
        """Return how many bytes a segment should have at most where `longest` is the most."""
        relays = self.relays and (hosts > 1 or not self.grouped)
        return min(longest, _RELAYED) if relays else longest

    def schedule(
        self,
        rank: int,
        size: int,
        root: int = -1,
        groups: tuple[Any, ...] | None = None,
        bandwidths: tuple[float, ...] | None = None,
    ) -> Schedule:
        """Return the schedule of one rank, proved right with those of all others.

        Parameters
        ----------
        rank, size : int
            Whose schedule, among how many ranks.
        root : int
            For collectives that have one.
        groups : nested tuple of int, optional
            The ranks host by host; all on one host if None.
        bandwidths : tuple of float, optional
            How fast the road of each rank to other hosts is, for algorithms that cut by it.

        Raises
        ------
        ScheduleError
            If it is not right. Of other people's algorithms, those on up to 128 ranks are proved.
        """
        arguments: tuple[Any, ...] = (root,) if self.collective in ROOTED else ()
        if self.grouped:
            arguments += (tuple(range(size)) if groups is None else groups,)
        options: dict[str, Any] = {}
        if self.weighted and bandwidths is not None and len(hosts_of(arguments[-1])) > 1:
            options["bandwidths"] = bandwidths
        if not self.trusted and size <= _VERIFIED_RANKS and (size, arguments) not in self._proved:
            self._check([self._built(peer, size, arguments, options) for peer in range(size)], root)
            self._proved.add((size, arguments))
        return self._built(rank, size, arguments, options)

    def schedules(
        self,
        size: int,
        root: int = -1,
        groups: tuple[Any, ...] | None = None,
        bandwidths: tuple[float, ...] | None = None,
    ) -> list[Schedule]:
        """Return the schedules of all ranks; parameters as in `schedule`."""
        with many_objects():
            return [self.schedule(rank, size, root, groups, bandwidths) for rank in range(size)]

    def _built(
        self, rank: int, size: int, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Schedule:
        built = self.build(rank, size, *arguments, **options)
        if not isinstance(built, Schedule):
            raise ScheduleError(
                f"algorithm {self.name!r} returns {type(built).__name__} instead of a Schedule"
            )
        if (built.collective, built.rank, built.size) != (self.collective, rank, size):
            raise ScheduleError(
                f"algorithm {self.name!r} for {self.collective} returns a schedule of "
                f"{built.collective} for rank {built.rank} of {built.size}, asked for rank {rank} "
                f"of {size}"
            )
        return built

    def _check(self, schedules: list[Schedule], root: int) -> None:
        first = schedules[0]
        if first.root != root:
            raise ScheduleError(f"algorithm {self.name!r} has root {first.root} instead of {root}")
        try:
            verify(schedules)
        except ScheduleError as error:
            raise ScheduleError(
                f"algorithm {self.name!r} is wrong on {first.size} ranks: {error}"
            ) from error


_algorithms: dict[str, dict[str, Algorithm]] = {collective: {} for collective in COLLECTIVES}


class Watcher(Protocol):
    """Whoever remembers what algorithms have built."""

    def forget(self) -> None:
        """Remember nothing any more."""


_watchers: "WeakSet[Watcher]" = WeakSet()


def watch(watcher: Watcher) -> None:
    """Have `watcher` forget when algorithms come or go; it is not kept alive."""
    _watchers.add(watcher)


def _changed() -> None:
    for watcher in tuple(_watchers):
        watcher.forget()


def names(collective: str) -> tuple[str, ...]:
    """Return the names of the algorithms for `collective`.

    Raises
    ------
    ArgumentValueError
        If there is no such collective.
    """
    try:
        return tuple(_algorithms[collective])
    except (KeyError, TypeError):
        raise ArgumentValueError(
            f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}"
        ) from None


def algorithm_of(collective: str, name: str) -> Algorithm:
    """Return the algorithm called `name`.

    Raises
    ------
    ArgumentValueError
        If there is none for `collective`.
    """
    own = names(collective)
    try:
        return _algorithms[collective][name]
    except (KeyError, TypeError):
        known = ", ".join((*RESERVED, *own))
        raise ArgumentValueError(
            f"unknown algorithm {name!r} for {collective}; known: {known}"
        ) from None


def register(
    collective: str,
    name: str,
    build: Callable[..., Schedule],
    *,
    grouped: bool = False,
    rounds_once: bool = False,
    relays: bool = False,
) -> Algorithm:
    """Add an algorithm, on all ranks alike: ``algorithm=name`` then runs it.

    It is proved right before it first runs on a number of ranks.

    Parameters
    ----------
    collective : str
        One of `pycomm.algorithms.COLLECTIVES`.
    name : str
        A new name.
    build : callable
        Returns the `Schedule` of one rank: ``build(rank, size)``, with ``root`` after them for
        broadcast, gather, reduce and scatter. A pure function: equal arguments give equal
        schedules.
    grouped : bool
        Whether `build` takes the ranks host by host, a tuple of tuples, as last argument.
    rounds_once : bool
        Whether every reduction combines the contributions of all ranks at once; needed for
        averages of integers.
    relays : bool
        Whether data goes through ranks as it is, and so should go in many short segments.

    Returns
    -------
    Algorithm
        What was added.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If there is no such collective, the name is taken or no name, or `build` not callable.
    """
    if not isinstance(collective, str) or not isinstance(name, str) or not callable(build):
        raise ArgumentTypeError(
            "an algorithm has a collective and a name, both str, and a callable that builds it"
        )
    if collective not in _algorithms:
        raise ArgumentValueError(
            f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}"
        )
    if not name.isidentifier() or iskeyword(name):
        raise ArgumentValueError(f"the name of an algorithm is a Python identifier, not {name!r}")
    if name in RESERVED or name in _algorithms[collective]:
        raise ArgumentValueError(f"there is an algorithm {name!r} for {collective} already")
    algorithm = Algorithm(collective, name, build, grouped, rounds_once, relays)
    _algorithms[collective][name] = algorithm
    _changed()
    return algorithm


def unregister(collective: str, name: str) -> None:
    """Remove an algorithm that `register` has added.

    Raises
    ------
    ArgumentValueError
        If there is no such algorithm, or it is one of pycomm's own.
    """
    if algorithm_of(collective, name).trusted:
        raise ArgumentValueError(f"{name!r} for {collective} is pycomm's own")
    del _algorithms[collective][name]
    _changed()


def _own(collective: str, name: str, build: Callable[..., Schedule], **facts: bool) -> None:
    _algorithms[collective][name] = Algorithm(collective, name, build, trusted=True, **facts)


_own("all_reduce", "one_shot", direct.one_shot_all_reduce, rounds_once=True)
_own("all_reduce", "direct", direct.direct_all_reduce, rounds_once=True)
_own("all_reduce", "ring", ring.ring_all_reduce)
_own("all_reduce", "recursive_doubling", recursive.recursive_doubling_all_reduce)
_own("all_reduce", "halving_doubling", recursive.halving_doubling_all_reduce)
_own("all_reduce", "binomial", tree.binomial_all_reduce, relays=True)
_own("all_reduce", "double_tree", tree.double_tree_all_reduce, relays=True)
_own(
    "all_reduce",
    "hierarchical",
    hierarchical.hierarchical_all_reduce,
    grouped=True,
    relays=True,
    weighted=True,
)
_own("reduce_scatter", "direct", direct.direct_reduce_scatter, rounds_once=True)
_own("reduce_scatter", "ring", ring.ring_reduce_scatter)
_own(
    "reduce_scatter",
    "hierarchical",
    hierarchical.hierarchical_reduce_scatter,
    grouped=True,
    relays=True,
)
_own("all_gather", "direct", direct.direct_all_gather)
_own("all_gather", "ring", ring.ring_all_gather)
_own("all_gather", "bruck", bruck.bruck_all_gather)
_own("all_gather", "hierarchical", hierarchical.hierarchical_all_gather, grouped=True, relays=True)
_own("broadcast", "binomial", tree.binomial_broadcast, relays=True)
_own("broadcast", "double_tree", tree.double_tree_broadcast, relays=True)
_own("broadcast", "ring", ring.ring_broadcast, relays=True)
_own(
    "broadcast",
    "hierarchical",
    hierarchical.hierarchical_broadcast,
    grouped=True,
    relays=True,
    weighted=True,
)
_own("reduce", "direct", direct.direct_reduce, rounds_once=True)
_own("reduce", "binomial", tree.binomial_reduce, relays=True)
_own("reduce", "double_tree", tree.double_tree_reduce, relays=True)
_own("all_to_all", "direct", direct.direct_all_to_all)
_own("all_to_all", "bruck", bruck.bruck_all_to_all)
_own("gather", "direct", direct.direct_gather)
_own("scatter", "direct", direct.direct_scatter)
_own("barrier", "dissemination", bruck.dissemination_barrier)

"""What `--compression` adds: a row for each name, and how far its results are from exact ones.

Formats of few bits are near, never equal, so what is checked here are random values: standard
normal, of a seed for each rank and piece, so that every rank can tell what all others have sent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pycomm.algorithms.compression import ErrorFeedback
from pycomm.bench.cases import Case, Counts, Placement, planned
from pycomm.bench.results import Compression
from pycomm.dtypes import DType
from pycomm.errors import ArgumentValueError

if TYPE_CHECKING:
    from pycomm import Communicator

__all__ = ["CALLS", "NAMES", "Trial", "Variant", "compressed", "count_wrong", "unfit", "variants"]

Array = NDArray[Any]
Call = Callable[..., Any]

# Half a step of each format, relative to a value: what rounding may change.
_HALF_STEPS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}
NAMES = ("none", *_HALF_STEPS)

# The part of half a step of 1 that values near 0 may be off by: there the steps of a format, and of
# a block whose scale is that of its largest value, get no smaller. Normal values are below 7.
_NEAR_ZERO = 1 / 64

# How often each collective encodes what arrives in a result, one time after the other.
_ENCODED = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}

#: Calls on the same input whose mean is compared where there is error feedback.
CALLS = 10

_PIECE = 1 << 15  # values of one seed


def unfit(
    case: Case,
    combinations: Sequence[tuple[DType, str | None]],
    names: Sequence[str],
    feedback: bool,
    style: str,
) -> str | None:
    """Return why a run cannot be made with these compressions, None if it can."""
    flag = "argument --compression:"
    if tuple(names) == ("none",):
        nothing = "argument --error-feedback: nothing is rounded; name a --compression"
        return nothing if feedback else None
    if case.name not in _ENCODED:
        return f"{flag} it is for {', '.join(_ENCODED)}, not for {case.name}"
    if any(dtype.name != "float32" for dtype, _ in combinations):
        return f"{flag} it is for type float only"
    if any(op not in (None, "sum", "avg") for _, op in combinations):
        return f"{flag} it is for op sum and avg only"
    return f"{flag} the osu columns have no place for it" if style == "osu" else None


@dataclass(frozen=True, slots=True)
class Variant:
    """What a row is about: an algorithm, and what its messages are encoded with.

    Attributes
    ----------
    algorithm : str or None
        Its name, None if none was asked for.
    name : str
        One of `NAMES`.
    feedback : ErrorFeedback or None
        That of this row, with a key for each side, if it was asked for.
    """

    algorithm: str | None
    name: str = "none"
    feedback: ErrorFeedback | None = None

    def arguments(self, in_place: bool) -> dict[str, Any]:
        """Return the arguments of its calls on that side."""
        found: dict[str, Any] = {"algorithm": self.algorithm}
        if self.feedback is not None:
            found["compression"] = self.feedback
            found["key"] = "in_place" if in_place else "out_of_place"
        elif self.name != "none":
            found["compression"] = self.name
        return found

    def reset(self) -> None:
        """Forget what earlier calls have left to be fed back."""
        if self.feedback is not None:
            self.feedback.reset()


def variants(
    case: Case,
    comm: "Communicator",
    placement: Placement,
    algorithms: Sequence[str | None],
    names: Sequence[str],
    *,
    feedback: bool,
    op: Any,
    root: int,
) -> list[Variant]:
    """Return all combinations of algorithms and compressions that work for the call.

    Raises
    ------
    ArgumentValueError
        If none does, or if there is no such algorithm.
    """
    found = []
    reason = None
    for algorithm in algorithms:
        for name in names:
            encoded = name != "none"
            one = Variant(algorithm, name, ErrorFeedback(name) if feedback and encoded else None)
            try:
                if encoded:
                    planned(case, comm, placement, op=op, root=root, **one.arguments(False))
            except ArgumentValueError as error:
                # It may not exist at all, and that is not to be passed over.
                planned(case, comm, placement, op=op, root=root, algorithm=algorithm)
                reason = reason or error
            else:
                found.append(one)
    if reason is not None and not found:
        raise reason
    return found


@dataclass(frozen=True, slots=True)
class Trial:
    """Calls on random values, and what their results are near to.

    Attributes
    ----------
    case, op, counts
        The call; `op` is None where nothing is reduced.
    rank, size : int
        This rank, and how many there are.
    repeat : int
        Number of the trial, for values of its own.
    """

    case: Case
    op: str | None
    counts: Counts
    rank: int
    size: int
    repeat: int = 0

    def values(self, rank: int, start: int, stop: int) -> Array:
        """Return elements `start` to `stop` of the input of `rank`."""
        found: Array = np.empty(stop - start, np.float32)
        for first, last in _pieces(start, stop):
            piece, skipped = divmod(first, _PIECE)
            random = np.random.default_rng((self.repeat, rank, piece))
            drawn = random.standard_normal(skipped + last - first, np.float32)
            found[first - start : last - start] = drawn[skipped:]
        return found

    def prepare(self, placement: Placement) -> None:
        """Write this rank's input; an element of the result that nobody writes is not a number."""
        if placement.result is not None:
            placement.result.fill(np.nan)
        if placement.source is not None:
            for start, stop in _pieces(0, placement.source.size):
                placement.source[start:stop] = self.values(self.rank, start, stop)

    def expected(self) -> Iterator[tuple[slice, Array, Array]]:
        """Yield the exact result of this rank in pieces.

        Each with its place, and with the magnitudes that rounding is relative to: those of all that
        is added up.
        """
        part = self.counts.param
        if not self.case.reduces:
            for rank in range(self.size):
                for start, stop in _pieces(0, part):
                    exact = self.values(rank, start, stop).astype(np.float64)
                    yield slice(rank * part + start, rank * part + stop), exact, np.abs(exact)
            return
        offset = self.rank * part if self.case.send_parts else 0
        divisor = self.size if self.op == "avg" else 1
        for start, stop in _pieces(offset, offset + part):
            exact, magnitude = np.zeros((2, stop - start))
            for rank in range(self.size):
                values = self.values(rank, start, stop)
                exact += values
                magnitude += np.abs(values)
            yield slice(start - offset, stop - offset), exact / divisor, magnitude / divisor

    def wrong(self, found: Array, name: str) -> int:
        """Return how many elements are farther off than the format of that name allows."""
        half = _HALF_STEPS[name]
        times = _ENCODED[self.case.name]
        terms = self.size if self.op == "sum" else 1
        wrong = 0
        for where, exact, magnitude in self.expected():
            allowed = ((1 + half) ** times - 1) * magnitude + times * terms * half * _NEAR_ZERO
            wrong += int(np.count_nonzero(~(np.abs(found[where] - exact) <= allowed)))
        return wrong

    def errors(self, found: Array) -> tuple[float, float, float, int]:
        """Return the largest and the sum of all errors, the largest exact result, and the count."""
        largest, total, scale = np.zeros(3)
        for where, exact, _ in self.expected():
            error = np.abs(found[where] - exact)
            largest = np.maximum(largest, error.max())
            total += error.sum()
            scale = np.maximum(scale, np.abs(exact).max())
        return float(largest), float(total), float(scale), found.size


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of ``[start, stop)`` that lie in one piece each."""
    while start < stop:
        end = min((start // _PIECE + 1) * _PIECE, stop)
        yield start, end
        start = end


def count_wrong(trials: Sequence[Trial], variant: Variant, placement: Placement, call: Call) -> int:
    """Return the wrong elements of this rank; each trial is a first call to error feedback."""
    wrong = 0
    for trial in trials:
        variant.reset()
        trial.prepare(placement)
        call()
        if placement.result is not None:
            wrong += trial.wrong(placement.result, variant.name)
    return wrong


def compressed(
    comm: "Communicator",
    trial: Trial,
    variant: Variant,
    placement: Placement,
    call: Call,
    sent: int | None,
) -> Compression:
    """Return what a row tells of its compression: its errors are those of all ranks.

    Parameters
    ----------
    comm, trial, variant
        All ranks, their values, and the row.
    placement, call
        The call out of place, and its arrays.
    sent : int or None
        Bytes that all ranks together have sent in one call.
    """
    variant.reset()
    trial.prepare(placement)
    assert placement.result is not None
    call()
    found = placement.result
    if variant.feedback is not None:
        total = found.astype(np.float64)
        for _ in range(CALLS - 1):
            call()
            total += placement.result
        found = total / CALLS
    everyone = comm.all_gather_object(trial.errors(found))
    largest, total_error, scale, count = np.array(everyone).T
    both: list[float | None] = [None, None]
    if scale.max(initial=0):
        # A result that is not finite has no error that JSON could hold.
        errors = largest.max() / scale.max(), total_error.sum() / count.sum() / scale.max()
        both = [float(error) if np.isfinite(error) else None for error in errors]
    return Compression(variant.name, variant.feedback is not None, sent, *both)

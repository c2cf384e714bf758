"""Everything pycomm raises, from one root.

Two families. What goes wrong *between* ranks derives from `CommError`. What is wrong with the
arguments of one call derives from `ValueError` or `TypeError` and is raised on the calling rank
before anything is sent, so the communicator stays usable.

All of them pickle: the message is the only positional argument, facts are attributes.
"""

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "CommError",
    "CommTimeoutError",
    "LibraryNotFoundError",
    "MPIError",
    "MismatchError",
    "PeerError",
    "ScheduleError",
]


def describe(error: BaseException) -> str:
    """Return type and text of an error, for messages; its text may itself fail."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return name
    return f"{name}: {text}" if text else name


class ArgumentValueError(ValueError):
    """An argument of the right kind whose value cannot be used: shape, overlap, root, ..."""


class ArgumentTypeError(TypeError):
    """An argument of a kind that cannot be used (dtype, object, operation on a dtype, ...)."""


class CommError(RuntimeError):
    """The root of what goes wrong between ranks.

    Parameters
    ----------
    message : str
        What happened, on which rank, and what to do about it.
    operation : str, optional
        Name of the operation that failed, for instance ``"all_reduce"``.
    sequence : int, optional
        Number of that operation on its communicator, counted from 0.
    rank : int, optional
        The rank in that communicator that raises.
    """

    def __init__(
        self,
        message: str = "",
        *,
        operation: str | None = None,
        sequence: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.sequence = sequence
        self.rank = rank


class MPIError(CommError):
    """MPI returned an error code; `code` and `error_class` are MPI's own numbers."""

    code: int | None = None
    error_class: int | None = None


class MismatchError(CommError):
    """Ranks disagree about a call: another operation, dtype, count, reduce op or root."""


class PeerError(CommError):
    """A peer left the communicator or gave up on an operation; `peers` are its ranks."""

    peers: tuple[int, ...] = ()


class CommTimeoutError(CommError, TimeoutError):
    """A deadline passed.

    `missing` holds the ranks that were not heard from, `timeout` the seconds that were allowed.
    """

    missing: tuple[int, ...] = ()
    timeout: float | None = None


class ScheduleError(ArgumentValueError):
    """A schedule that cannot be right; the message names the rank, the round and the step."""


class LibraryNotFoundError(CommError):
    """A library that the call needs is not there; the message lists what was tried."""

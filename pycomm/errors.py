"""Everything pycomm raises, from one root.

Two families. What goes wrong *between* ranks derives from `CommError`. What is wrong with the
arguments of one call derives from `ValueError` or `TypeError` and is raised on the calling rank
before anything is sent, so the communicator stays usable.

All of them pickle: the message is the only positional argument, facts are attributes.
"""

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "CUDAError",
    "CommError",
    "CommTimeoutError",
    "LibraryConflictError",
    "LibraryNotFoundError",
    "MPIError",
    "MismatchError",
    "NCCLError",
    "NCCLInternalError",
    "NCCLInvalidArgumentError",
    "NCCLInvalidUsageError",
    "NCCLRemoteError",
    "NCCLSystemError",
    "NCCLTimeoutError",
    "NCCLUnhandledCudaError",
    "PeerError",
    "ScheduleError",
    "UnsupportedError",
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


class LibraryConflictError(LibraryNotFoundError):
    """Two different copies of a library that must be one per process; the message names both."""


class UnsupportedError(CommError):
    """The library in use is too old; the message names what is missing and who first has it."""


class CUDAError(CommError):
    """The CUDA driver returned an error code to `function`; `name` is its name in C."""

    code: int | None = None
    name: str | None = None
    function: str | None = None


class NCCLError(CommError):
    """NCCL returned an error code to `function`; `last_error` is what NCCL had to say.

    NCCL keeps its last words: they may belong to an earlier failure.
    """

    code: int | None = None
    function: str | None = None
    last_error: str | None = None


class NCCLUnhandledCudaError(NCCLError):
    """A call of CUDA failed inside NCCL."""

    code = 1


class NCCLSystemError(NCCLError):
    """A call of the operating system failed inside NCCL."""

    code = 2


class NCCLInternalError(NCCLError):
    """NCCL failed inside, by its own fault or by that of memory or network."""

    code = 3


class NCCLInvalidArgumentError(NCCLError):
    """NCCL refused the value of an argument."""

    code = 4


class NCCLInvalidUsageError(NCCLError):
    """NCCL was called in a way that cannot be: order of calls, groups, devices used twice."""

    code = 5


class NCCLRemoteError(NCCLError):
    """A peer has left, or the network between this rank and a peer has failed."""

    code = 6


class NCCLTimeoutError(NCCLError, CommTimeoutError):
    """NCCL gave up waiting."""

    code = 8

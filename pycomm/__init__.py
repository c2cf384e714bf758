"""pycomm: collective communication for Python arrays.

The names in ``__all__`` are the stable surface. Importing this package loads neither MPI nor CUDA;
`init` does, when it needs them.
"""

from importlib.metadata import PackageNotFoundError, version

from pycomm.buckets import GradientBuckets
from pycomm.communicator import Communicator
from pycomm.dtypes import ReduceOp, premul_sum
from pycomm.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CommError,
    CommTimeoutError,
    CUDAError,
    LibraryConflictError,
    LibraryNotFoundError,
    MismatchError,
    MPIError,
    NCCLError,
    NCCLInternalError,
    NCCLInvalidArgumentError,
    NCCLInvalidUsageError,
    NCCLRemoteError,
    NCCLSystemError,
    NCCLTimeoutError,
    NCCLUnhandledCudaError,
    PeerError,
    ScheduleError,
    UnsupportedError,
)
from pycomm.plans import Plan
from pycomm.start import get_unique_id, init, run_local
from pycomm.work import Work

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "CUDAError",
    "CommError",
    "CommTimeoutError",
    "Communicator",
    "GradientBuckets",
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
    "Plan",
    "ReduceOp",
    "ScheduleError",
    "UnsupportedError",
    "Work",
    "get_unique_id",
    "init",
    "premul_sum",
    "run_local",
]

try:
    __version__ = version("pycomm-collectives")
except PackageNotFoundError:  # a source tree on the path that was never installed
    __version__ = "unknown"

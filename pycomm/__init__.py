"""pycomm: collective communication for Python arrays.

The names in ``__all__`` are the stable surface. Importing this package loads neither MPI nor CUDA;
`init` does, when it needs them.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from pycomm.device.plans import DevicePlan
    from pycomm.device_arrays import DeviceArray
    from pycomm.streams import Event, Stream
    from pycomm.topology.manager import TopologyManager

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "CUDAError",
    "CommError",
    "CommTimeoutError",
    "Communicator",
    "DeviceArray",
    "DevicePlan",
    "Event",
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
    "Stream",
    "TopologyManager",
    "UnsupportedError",
    "Work",
    "get_unique_id",
    "init",
    "premul_sum",
    "run_local",
]

# What belongs to CUDA or looks at the machine is imported by whoever asks for it.
_ON_DEMAND = {
    "DeviceArray": "pycomm.device_arrays",
    "DevicePlan": "pycomm.device.plans",
    "Event": "pycomm.streams",
    "Stream": "pycomm.streams",
    "TopologyManager": "pycomm.topology.manager",
}


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return getattr(import_module(_ON_DEMAND[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


try:
    __version__ = version("pycomm-collectives")
except PackageNotFoundError:  # a source tree on the path that was never installed
    __version__ = "unknown"

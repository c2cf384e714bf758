"""Launchers by the environment variables they leave. Tiny, ordered, pure.

What is found here is a hint: how many ranks the launcher meant to start is compared with what MPI
says, and the local rank of a communicator comes from shared memory, not from a variable, since an
outer launcher's variables stay visible to an inner one's processes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["DETECTORS", "Launch", "detect"]


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher says about this process.

    Attributes
    ----------
    name : str
        The launcher: "Open MPI", "MPICH", "torchrun" or "Slurm".
    rank, size : int
        The process's rank and the number of processes.
    local_rank : int or None
        Its number among the processes of its host, if the launcher says so.
    evidence : str
        The variable that gave it away.
    """

    name: str
    rank: int
    size: int
    local_rank: int | None
    evidence: str


Environ = Mapping[str, str]


def _number(environ: Environ, name: str) -> int | None:
    """Return a variable as a non-negative number, None if it is none."""
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _launch(name: str, environ: Environ, rank: str, size: str, *local: str) -> Launch | None:
    found_rank, found_size = _number(environ, rank), _number(environ, size)
    if found_rank is None or found_size is None or not found_rank < found_size:
        return None
    local_rank = next((n for v in local if (n := _number(environ, v)) is not None), None)
    return Launch(name, found_rank, found_size, local_rank, size)


def _open_mpi(environ: Environ) -> Launch | None:
    # OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0
    return _launch(
        "Open MPI",
        environ,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    )


def _mpich(environ: Environ) -> Launch | None:
    # Hydra, also Intel MPI's: PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0
    return _launch("MPICH", environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")


def _torchrun(environ: Environ) -> Launch | None:
    # TORCHELASTIC_RUN_ID=none RANK=2 WORLD_SIZE=4 LOCAL_RANK=0
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    return _launch("torchrun", environ, "RANK", "WORLD_SIZE", "LOCAL_RANK")


def _slurm(environ: Environ) -> Launch | None:
    # A step started by srun: SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=0. The variable
    # SLURM_NTASKS alone does not tell: the batch script itself, which is one process, has it too.
    return _launch("Slurm", environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


#: In the order of asking. Slurm comes last: mpirun and torchrun run inside its allocations, and
#: their processes see its variables.
DETECTORS: tuple[Callable[[Environ], Launch | None], ...] = (
    _open_mpi,
    _mpich,
    _torchrun,
    _slurm,
)


def detect(environ: Environ) -> Launch | None:
    """Return what the first launcher that recognises `environ` says, None without a launcher.

    Parameters
    ----------
    environ : mapping of str to str
        The environment, usually ``os.environ``.
    """
    return next((launch for detector in DETECTORS if (launch := detector(environ))), None)

"""Launchers, by dictionaries as environments."""

import pytest

from pycomm.bootstrap.detect import detect

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM_STEP = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OPEN_MPI, ("Open MPI", 2, 4, 0)),
        (MPICH, ("MPICH", 1, 3, 1)),
        (SLURM_STEP, ("Slurm", 5, 8, 1)),
        (TORCHRUN, ("torchrun", 1, 2, 1)),
        # mpirun and torchrun inside a Slurm allocation, whose outer variables stay visible.
        (SLURM_STEP | OPEN_MPI | {"SLURM_LOCALID": "0"}, ("Open MPI", 2, 4, 0)),
        (SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "6"} | TORCHRUN, ("torchrun", 1, 2, 1)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ("MPICH", 0, 1, None)),
    ],
)
def test_known_launchers(
    environ: dict[str, str], expected: tuple[str, int, int, int | None]
) -> None:
    found = detect(environ)
    assert found is not None
    assert (found.name, found.rank, found.size, found.local_rank) == expected
    assert environ[found.evidence] == str(found.size)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"HOME": "/root"},
        # A batch script of Slurm is one process, whatever its allocation.
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        # RANK and WORLD_SIZE alone are anybody's variables.
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"OMPI_COMM_WORLD_SIZE": "four", "OMPI_COMM_WORLD_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "2"},
        {"OMPI_COMM_WORLD_SIZE": "-1", "OMPI_COMM_WORLD_RANK": "-1"},
        {"OMPI_COMM_WORLD_SIZE": "", "OMPI_COMM_WORLD_RANK": ""},
    ],
)
def test_no_launcher(environ: dict[str, str]) -> None:
    assert detect(environ) is None

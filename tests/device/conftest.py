"""For tests on devices: the doubles of libcuda and libnccl stand in for a GPU and its libraries.

They are loaded before anybody looks for the real ones, and a copy that is mapped wins.
"""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from doubles.build import Doubles, with_kernels
from support.ranks import comm, together

__all__ = ["comm", "together"]

ROOT = Path(__file__).resolve().parent.parent.parent


def _load() -> Doubles:
    os.environ.setdefault("PYCOMM_DOUBLE_DELAY_US", "20")
    if os.environ.get("OMPI_COMM_WORLD_SIZE") == "3":
        # NCCL takes calls over later than it returns from them, as it may.
        os.environ.setdefault("PYCOMM_DOUBLE_IN_PROGRESS", "2")
    for variable in ("PYCOMM_NCCL_LIB", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(variable, None)
    made = with_kernels()
    os.environ.update(made.environment())
    return made


DOUBLES = _load()
LIBCUDA = ctypes.CDLL(str(DOUBLES.libcuda), mode=ctypes.RTLD_GLOBAL)
LIBNCCL = ctypes.CDLL(str(DOUBLES.libnccl), mode=ctypes.RTLD_GLOBAL)
LIBCUDA.double_races.restype = ctypes.c_ulonglong
LIBCUDA.double_last_race.restype = ctypes.c_char_p
LIBCUDA.double_allocated.restype = ctypes.c_longlong
LIBNCCL.double_misuse.restype = ctypes.c_ulonglong
LIBNCCL.double_last_misuse.restype = ctypes.c_char_p


@pytest.fixture
def libcuda() -> ctypes.CDLL:
    """The double of the driver, for its controls."""
    return LIBCUDA


@pytest.fixture
def libnccl() -> ctypes.CDLL:
    """The double of NCCL, for its controls."""
    return LIBNCCL


@pytest.fixture(autouse=True)
def _checked() -> Iterator[None]:
    """Whatever hardware would punish, and an unbalanced context stack, fails the test."""
    LIBCUDA.double_reset_races()
    depth, misuse = LIBCUDA.double_context_depth(), LIBNCCL.double_misuse()
    yield
    assert LIBCUDA.double_races() == 0, LIBCUDA.double_last_race().decode()
    assert LIBNCCL.double_misuse() == misuse, LIBNCCL.double_last_misuse().decode()
    assert LIBCUDA.double_context_depth() == depth

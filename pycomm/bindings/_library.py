"""Finding and loading shared libraries: where libnccl and the CUDA driver are, and whose they are.

Nothing here runs at import. A library that is missing becomes one error that names every path
tried and what the loader said, raised by the call that needs it.

A process must hold one libnccl only: a second copy has its own state and its own threads. So the
copy that is already mapped (by a framework, say) always wins.
"""

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from pycomm.errors import LibraryNotFoundError

__all__ = [
    "Library",
    "decode_cuda_version",
    "decode_nccl_version",
    "find_cuda_driver",
    "find_nccl",
    "mapped_path",
    "nccl_candidates",
]

NCCL_VARIABLE = "PYCOMM_NCCL_LIB"
MAPPED = "mapped by this process"
SYSTEM = "the system loader"

# Owner of what this module itself loaded: a second search finds it mapped and must not call it
# somebody else's.
_owners: dict[str, str] = {}


@dataclass(frozen=True)
class Library:
    """A loaded library: its name, the file it came from, its version and who provides it."""

    name: str
    path: str
    version: str
    owner: str


def decode_nccl_version(code: int) -> str:
    """Turn the number of ``ncclGetVersion`` into text: 22705 is 2.27.5, 2804 is 2.8.4."""
    # Since 2.9 the number is X*10000 + Y*100 + Z, before it was X*1000 + Y*100 + Z.
    major, rest = divmod(code, 10000 if code >= 10000 else 1000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"


def decode_cuda_version(code: int) -> str:
    """Turn the number of ``cuDriverGetVersion`` into text: 12040 is 12.4."""
    major, rest = divmod(code, 1000)
    return f"{major}.{rest // 10}"


def mapped_path(maps: str, stem: str) -> str | None:
    """Return the file of library `stem` (such as ``libnccl.so``) in the text of a maps file."""
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6:
            name = PurePath(fields[5]).name
            if name == stem or name.startswith(stem + "."):
                return fields[5]
    return None


def nccl_candidates(
    environ: Mapping[str, str], mapped: str | None, wheel: Iterable[str]
) -> list[tuple[str, str]]:
    """Return (path, owner) of every place to look for libnccl, best first.

    Parameters
    ----------
    environ : Mapping
        The environment; `PYCOMM_NCCL_LIB` in it names a file and then nothing else is tried.
    mapped : str or None
        The libnccl that this process has mapped already.
    wheel : Iterable of str
        Folders of the ``nvidia.nccl`` package.

    Raises
    ------
    LibraryNotFoundError
        If `PYCOMM_NCCL_LIB` names a file that is not there.
    """
    chosen = environ.get(NCCL_VARIABLE)
    if chosen and not Path(chosen).is_file():
        raise LibraryNotFoundError(
            f"{NCCL_VARIABLE}={chosen}: no such file; unset it or name a libnccl.so.2"
        )
    if mapped:
        owner = _owners.get(mapped, MAPPED)
        if chosen and Path(chosen).resolve() != Path(mapped).resolve():
            owner += f" ({NCCL_VARIABLE}={chosen} not used: one libnccl per process)"
        return [(mapped, owner)]
    if chosen:
        return [(chosen, NCCL_VARIABLE)]
    in_wheel = [
        (str(Path(folder, "lib", "libnccl.so.2")), "the nvidia-nccl wheel") for folder in wheel
    ]
    return [*in_wheel, ("libnccl.so.2", SYSTEM), ("libnccl.so", SYSTEM)]


def find_nccl() -> Library:
    """Find and load libnccl.

    Raises
    ------
    LibraryNotFoundError
        If there is none, with every path tried and the loader's words.
    """
    candidates = nccl_candidates(
        os.environ, mapped_path(_read_maps(), "libnccl.so"), _wheel_folders("nvidia.nccl")
    )
    hint = f"pip install nvidia-nccl-cu12, or name a file in {NCCL_VARIABLE}"
    return _first("libnccl", candidates, _nccl_version, hint)


def find_cuda_driver() -> Library:
    """Find and load the CUDA driver.

    Raises
    ------
    LibraryNotFoundError
        If there is none, with every path tried and the loader's words.
    """
    candidates = [("libcuda.so.1", SYSTEM), ("/usr/lib/wsl/lib/libcuda.so.1", SYSTEM)]
    return _first("libcuda", candidates, _cuda_version, "the NVIDIA driver provides it")


def _first(
    name: str,
    candidates: list[tuple[str, str]],
    version: Callable[[ctypes.CDLL], str],
    hint: str,
) -> Library:
    """Load the first candidate that works."""
    tried = []
    for path, owner in candidates:
        try:
            library = ctypes.CDLL(path)
            text = version(library)
        except (OSError, AttributeError) as error:
            tried.append(f"  {path} ({owner}): {error}")
            continue
        # A bare name or a link says little about the file: ask the process where it came from.
        real = mapped_path(_read_maps(), f"{name}.so") or path
        _owners.setdefault(real, owner)
        return Library(name, real, text, owner)
    raise LibraryNotFoundError(f"{name} not found ({hint}); tried\n" + "\n".join(tried))


def _nccl_version(library: ctypes.CDLL) -> str:
    get_version = library.ncclGetVersion  # ncclResult_t ncclGetVersion(int *version)
    get_version.argtypes = [ctypes.POINTER(ctypes.c_int)]
    get_version.restype = ctypes.c_int
    code = ctypes.c_int()
    if status := get_version(ctypes.byref(code)):
        raise OSError(f"ncclGetVersion returned {status}")
    return decode_nccl_version(code.value)


def _cuda_version(library: ctypes.CDLL) -> str:
    get_version = library.cuDriverGetVersion  # CUresult cuDriverGetVersion(int *driverVersion)
    get_version.argtypes = [ctypes.POINTER(ctypes.c_int)]
    get_version.restype = ctypes.c_int
    code = ctypes.c_int()
    if status := get_version(ctypes.byref(code)):
        # 34 is CUDA_ERROR_STUB_LIBRARY: the toolkit's link-time stub, not a driver.
        raise OSError(f"cuDriverGetVersion returned {status}")
    return decode_cuda_version(code.value)


def _wheel_folders(package: str) -> list[str]:
    """Return the folders of a package that may be a namespace package, without running it."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return []
    return list(spec.submodule_search_locations or []) if spec else []


def _read_maps() -> str:
    try:
        return Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return ""

"""Finding and loading shared libraries: where libnccl and the CUDA driver are, and whose they are.

Nothing here runs at import. A library that is missing becomes one error that names every path
tried and what the loader said, raised by the call that needs it.

A process must hold one libnccl only: a second copy has its own state and its own threads. So the
copy that is already mapped (by a framework, say) always wins, and where that cannot be, because
`PYCOMM_NCCL_LIB` wants another or two are mapped already, the answer is an error.
"""

import _ctypes
import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from pycomm.bindings._elf import find_fault
from pycomm.errors import LibraryConflictError, LibraryNotFoundError

__all__ = [
    "Library",
    "decode_cuda_version",
    "decode_nccl_version",
    "find_cuda_driver",
    "find_nccl",
    "load_cuda_driver",
    "load_nccl",
    "mapped_path",
    "mapped_paths",
    "nccl_candidates",
]

NCCL_VARIABLE = "PYCOMM_NCCL_LIB"
MAPPED = "mapped by this process"
SYSTEM = "the system loader"
WHEEL = "the nvidia-nccl wheel"

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


def mapped_paths(maps: str, stem: str) -> list[str]:
    """Return the files of library `stem` (such as ``libnccl.so``) in the text of a maps file.

    Only those whose code is mapped count: a file may also be mapped to be read. One file under two
    names counts once.
    """
    found: dict[tuple[str, str], str] = {}
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "x" in fields[1]:
            name = PurePath(fields[5]).name
            if name == stem or name.startswith(stem + "."):
                found.setdefault((fields[3], fields[4]), fields[5].removesuffix(" (deleted)"))
    return list(found.values())


def mapped_path(maps: str, stem: str) -> str | None:
    """Return the first of `mapped_paths`, None where there is none."""
    return next(iter(mapped_paths(maps, stem)), None)


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
    LibraryConflictError
        If it names another file than the one that is mapped.
    """
    chosen = environ.get(NCCL_VARIABLE)
    if chosen and not Path(chosen).is_file():
        raise LibraryNotFoundError(
            f"{NCCL_VARIABLE}={chosen}: no such file; unset it or name a libnccl.so.2"
        )
    if mapped:
        if chosen and not _is_same(chosen, mapped):
            raise LibraryConflictError(
                f"{NCCL_VARIABLE}={chosen}, but this process has mapped {_whose(mapped)} already,"
                f" and there can be one libnccl only: unset {NCCL_VARIABLE} to use that one, or"
                " keep whoever maps it from being loaded before pycomm uses NCCL"
            )
        return [(mapped, _owners.get(mapped, MAPPED))]
    if chosen:
        # With a folder: a bare name means a file here, but to the loader one of the system.
        return [(str(Path(chosen).absolute()), NCCL_VARIABLE)]
    in_wheel = [(str(Path(folder, "lib", "libnccl.so.2")), WHEEL) for folder in wheel]
    return [*in_wheel, ("libnccl.so.2", SYSTEM), ("libnccl.so", SYSTEM)]


def load_nccl() -> tuple[Library, ctypes.CDLL]:
    """Find and load libnccl; return what it is, and the handle.

    Raises
    ------
    LibraryNotFoundError
        If there is none, with every path tried and the loader's words.
    LibraryConflictError
        If this process would hold, or holds, two different ones.
    """
    mapped = mapped_paths(_read_maps(), "libnccl.so")
    if len(mapped) > 1:
        raise LibraryConflictError(
            "this process has mapped more than one libnccl, and each would go its own way: "
            + ", ".join(map(_whose, mapped))
            + "; keep one of them from being loaded"
        )
    candidates = nccl_candidates(
        os.environ, mapped[0] if mapped else None, _wheel_folders("nvidia.nccl")
    )
    hint = f"pip install nvidia-nccl-cu12, or name a file in {NCCL_VARIABLE}"
    return _first("libnccl", candidates, _nccl_version, hint)


def find_nccl() -> Library:
    """Find and load libnccl; return what it is. Raises what `load_nccl` raises."""
    return load_nccl()[0]


def load_cuda_driver() -> tuple[Library, ctypes.CDLL]:
    """Find and load the CUDA driver; return what it is, and the handle.

    Raises
    ------
    LibraryNotFoundError
        If there is none, with every path tried and the loader's words.
    """
    mapped = mapped_path(_read_maps(), "libcuda.so")
    if mapped:
        candidates = [(mapped, _owners.get(mapped, MAPPED))]
    else:
        candidates = [("libcuda.so.1", SYSTEM), ("/usr/lib/wsl/lib/libcuda.so.1", SYSTEM)]
    return _first("libcuda", candidates, _cuda_version, "the NVIDIA driver provides it")


def find_cuda_driver() -> Library:
    """Find and load the CUDA driver; return what it is. Raises what `load_cuda_driver` raises."""
    return load_cuda_driver()[0]


def _first(
    name: str,
    candidates: list[tuple[str, str]],
    version: Callable[[ctypes.CDLL], str],
    hint: str,
) -> tuple[Library, ctypes.CDLL]:
    """Load the first candidate that works."""
    tried = []
    for path, owner in candidates:
        fault = _fault(path)
        if fault:
            tried.append(f"  {path} ({owner}): {fault}")
            continue
        handle = None
        try:
            handle = ctypes.CDLL(path)
            text = version(handle)
        except (OSError, AttributeError) as error:
            tried.append(f"  {path} ({owner}): {error}")
            if handle is not None:
                # Else it would stay mapped, and the next candidate be the second copy.
                _ctypes.dlclose(handle._handle)
            continue
        # A bare name or a link says little about the file: ask the process where it came from.
        real = mapped_path(_read_maps(), f"{name}.so") or path
        _owners.setdefault(real, owner)
        return Library(name, real, text, owner), handle
    raise LibraryNotFoundError(f"{name} not found ({hint}); tried\n" + "\n".join(tried))


def _fault(path: str) -> str | None:
    """Return why a candidate must not be given to the loader, None where it may."""
    if "/" in path:
        return find_fault(path) if Path(path).is_file() else None
    # The loader takes the first file of that name, and there is no asking it which.
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        file = Path(folder, path)
        if file.is_file():
            fault = find_fault(file)
            return fault and f"{file}: {fault}"
    return None


def _is_same(one: str, other: str) -> bool:
    try:
        # Also true of two names of one file (hard links), which the loader takes for one library.
        return Path(one).samefile(other)
    except OSError:  # one is mapped, but its file is gone
        return Path(one).resolve() == Path(other).resolve()


def _whose(path: str) -> str:
    """Return a mapped file with what can be known of who mapped it."""
    parts = PurePath(path).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            package = parts[parts.index(folder) + 1 :][:2]
            # Packages of NVIDIA share a folder; a framework has its own.
            inside = ".".join(package if package[0] == "nvidia" else package[:1])
            return f"{path} ({_owners.get(path, f'of the package {inside}')})"
    return f"{path} ({_owners.get(path, 'by someone other than pycomm')})"


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

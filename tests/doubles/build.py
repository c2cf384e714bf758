"""Compiling the doubles, once for the sources and options that they are compiled from.

``python tests/doubles/build.py`` prints what a shell has to export for a program that shall find
the doubles in place of libcuda and libnccl.
"""

import fcntl
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent / "pycomm" / "kernels" / "device.cu"
DEFAULT_PLACE = HERE.parent.parent / "build" / "doubles"
NCCL_VERSION = 23203

# Since which version the library has what it did not always have.
SINCE = {
    "ncclCommFinalize ncclCommInitRankConfig": 21400,
    "ncclCommSplit": 21800,
    "ncclCommRegister ncclCommDeregister ncclMemAlloc ncclMemFree": 21900,
    "ncclGroupSimulateEnd": 22200,
    "ncclCommInitRankScalable": 22300,
    "ncclCommWindowRegister ncclCommWindowDeregister ncclCommShrink": 22700,
    "ncclAlltoAll ncclGather ncclScatter": 22800,
    "ncclCommRevoke ncclCommGetUniqueId ncclCommGrow ncclCommSuspend ncclCommResume": 22900,
    "ncclCommMemStats ncclWinGetUserPtr ncclPutSignal ncclSignal ncclWaitSignal": 22900,
    "ncclSetEncryption ncclAllReduceConfig ncclBroadcastConfig": 23200,
    "ncclReduceConfig ncclAllGatherConfig ncclReduceScatterConfig": 23200,
    "ncclAlltoAllConfig ncclGatherConfig ncclScatterConfig": 23200,
    "ncclParamBind ncclParamGet ncclParamGetStr ncclParamGetParameter": 23200,
    "ncclParamGetAllParameterKeys ncclParamDumpAll": 23200,
    " ".join(f"ncclParamGet{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64)): 23200,
}

C_OPTIONS = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Werror"]
# Texts and paths are cut where they are too long, which some compilers take for a mistake.
C_OPTIONS += ["-Wno-unknown-warning-option", "-Wno-format-truncation"]
# Contraction would round once where the GPU code was written to round twice.
KERNEL_OPTIONS = ["-std=c++17", "-O2", "-g", "-ffp-contract=off", "-w"]
SHARED = ["-shared", "-fPIC", "-fvisibility=hidden"]


@dataclass(frozen=True)
class Doubles:
    """Compiled doubles: their folder, the libraries, and the kernels where there are any."""

    folder: Path
    libcuda: Path
    libnccl: Path
    kernels: Path | None = None

    def environment(self) -> dict[str, str]:
        """Return the variables that a child process needs to find the doubles."""
        path = [str(self.folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        variables = {"LD_LIBRARY_PATH": ":".join(path), "PYCOMM_NCCL_LIB": str(self.libnccl)}
        if self.kernels is not None:
            variables["PYCOMM_DOUBLE_KERNELS"] = str(self.kernels)
            variables["XDG_CACHE_HOME"] = str(_cache())
        return variables


def headers() -> list[Path]:
    """Return the folders of the official headers."""
    found = []
    for package, header in (("nvidia.nccl", "nccl.h"), ("nvidia.cuda_runtime", "cuda.h")):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            spec = None
        places = (spec.submodule_search_locations if spec else None) or []
        folders = [Path(place) / "include" for place in places]
        folder = next((each for each in folders if (each / header).exists()), None)
        if folder is None:
            raise FileNotFoundError(f"{header} of {package} is not installed")
        found.append(folder)
    return found


def build(
    nccl_version: int = NCCL_VERSION,
    kernels: Sequence[str] = (),
    kernel_source: Path | None = None,
    *,
    place: Path | None = None,
) -> Doubles:
    """Compile what is not compiled yet; several processes may call at the same time.

    Parameters
    ----------
    nccl_version
        What ``ncclGetVersion`` reports; newer functions are left out of the library.
    kernels, kernel_source
        Names of the kernels to compile for the host, and the CUDA C that defines them.
    place
        Where compiled doubles are kept; by default ``build/doubles`` of the repository.
    """
    includes = [f"-isystem{folder}" for folder in headers()]
    options = [f"-DDOUBLE_NCCL_VERSION={nccl_version}"]
    chosen = (options, SINCE, C_OPTIONS, KERNEL_OPTIONS, list(kernels))
    digest = hashlib.sha256(repr(chosen).encode())
    inputs = sorted([*HERE.glob("*.[ch]"), *HERE.glob("include/**/*.h")])
    inputs += [folder / name for folder in headers() for name in ("nccl.h", "cuda.h")]
    if kernel_source:  # and what it may include
        inputs += [kernel_source, *sorted(kernel_source.parent.glob("*.cuh"))]
    for source in inputs:
        if source.exists():
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = _writable(place or DEFAULT_PLACE) / digest.hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    cuda, nccl = folder / "libcuda.so.1", folder / "libnccl.so.2"
    library = folder / "libkernels.so" if kernels else None
    with _locked(folder / "lock"):
        if not cuda.exists():
            _compile(["cc", *C_OPTIONS, *includes], sorted(HERE.glob("cuda_*.c")), cuda, ["-ldl"])
        if not nccl.exists():
            # Found beside it, also by a process that was started without LD_LIBRARY_PATH.
            script = folder / "exports"
            script.write_text(_exports(nccl_version))
            beside = [str(cuda), "-Wl,-rpath,$ORIGIN", f"-Wl,--version-script={script}", "-lm"]
            sources = sorted(HERE.glob("nccl_*.c"))
            _compile(["cc", *C_OPTIONS, *options, *includes], sources, nccl, beside)
        if library and not library.exists():
            _compile_kernels(kernels, kernel_source, library)
    return Doubles(folder, cuda, nccl, library)


def _exports(nccl_version: int) -> str:
    """Return the linker script that hides what the version does not have."""
    newer = [names.split() for names, since in SINCE.items() if since > nccl_version]
    hidden = "".join(f" {name};" for names in newer for name in names)
    return f"{{ global: nccl[A-Z]*; double_*; local:{hidden} *; }};\n"


def with_kernels(nccl_version: int = NCCL_VERSION) -> Doubles:
    """Return doubles that run pycomm's kernels, and see to it that those are compiled for real.

    By a process of its own: NVRTC looks at the driver that it finds mapped, and the double is not
    all that it expects.
    """
    from pycomm.kernels.cuda import NAMES

    script = "from pycomm.kernels.cuda import _image; _image('sm_90')"
    environ = os.environ | {"XDG_CACHE_HOME": str(_cache())}
    subprocess.run([sys.executable, "-c", script], check=True, env=environ)
    return build(nccl_version, NAMES, KERNELS)


def _cache() -> Path:
    """Return where kernels are kept that were compiled for real."""
    return _writable(DEFAULT_PLACE) / "cache"


def _compile(command: list[str], sources: Sequence[Path], target: Path, last: list[str]) -> None:
    partial = target.with_suffix(f".{os.getpid()}")
    flags = [f"-I{HERE}", f"-I{HERE / 'include'}", *SHARED, "-pthread", "-Wl,-z,defs"]
    named = [f"-Wl,-soname,{target.name}", "-o", str(partial)]
    done = subprocess.run(
        [*command, *flags, *map(str, sources), *named, *last],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"cannot compile {target.name}:\n{done.stderr}")
    partial.replace(target)


def _compile_kernels(kernels: Sequence[str], source: Path | None, target: Path) -> None:
    if source is None:
        raise ValueError("kernels need the source that defines them")
    generated = target.with_suffix(".cpp")
    lines = ['#include "kernel_shim.h"', f'#include "{source.resolve()}"']
    lines += [f"DOUBLE_KERNEL({name})" for name in kernels]
    generated.write_text("\n".join(lines) + "\n")
    _compile(["c++", *KERNEL_OPTIONS], [generated], target, [])


def _writable(place: Path) -> Path:
    with suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
    if not os.access(place, os.W_OK):
        place = Path(tempfile.gettempdir()) / f"pycomm-doubles-{os.getuid()}"
        place.mkdir(mode=0o700, exist_ok=True)
    return place


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    for variable, value in build().environment().items():
        sys.stdout.write(f"export {variable}={shlex.quote(value)}\n")

"""Arithmetic on device memory: the kernels of ``device.cu``, compiled for the device at hand.

NVRTC compiles them once for each architecture (cuda-python provides it); the result is kept in the
user's cache. They are launched through the driver, in the order of a stream, and nothing waits.
"""

import contextlib
import ctypes
import hashlib
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from pycomm.bindings.cuda import cuda
from pycomm.bindings.cuda_types import CUdevice_attribute
from pycomm.devices import Device, get_device
from pycomm.dtypes import DTYPES, DType, Kind, Op, PremulSum, ReduceOp
from pycomm.errors import ArgumentTypeError, CommError, LibraryNotFoundError

__all__ = ["MOST_SOURCES", "NAMES", "Kernels", "compile_kernels", "kernels_of", "sources"]

_PREFIX = "pycomm_"
#: How many sources a reduction takes at a time (``device.cu`` has the same number).
MOST_SOURCES = 128

_REDUCED = (
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "bfloat16", "float32", "float64",
)  # fmt: skip
FORMATS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")

#: All kernels of ``device.cu``.
NAMES: tuple[str, ...] = tuple(
    _PREFIX + name
    for name in (
        *(f"reduce_{op}_{kind}" for kind in _REDUCED for op in ReduceOp),
        *(f"scale_{kind}" for kind in _REDUCED),
        *(f"divide_{kind}" for kind in ("float32", "float64")),
        *(f"turn_{kind}" for kind in ("complex64", "complex128")),
        "peaks",
        *(f"{what}_{form}" for form in FORMATS for what in ("encode", "decode", "add_up")),
    )
)

_MAIN, _HEADERS = "device.cu", ("numbers.cuh", "arithmetic.cuh", "encoding.cuh")
_OPTIONS = ("--fmad=false", "--std=c++17")
_THREADS = 256  # of a block
_BLOCKS_EACH = 8  # blocks for each multiprocessor, which is more than it runs at a time
_EACH = 4  # elements a thread is worth being started for


class _Sources(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p * MOST_SOURCES)]


def sources() -> dict[str, str]:
    """Return the sources of the kernels by their names: ``device.cu`` includes the others."""
    folder = files("pycomm.kernels")
    return {name: folder.joinpath(name).read_text() for name in (_MAIN, *_HEADERS)}


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise LibraryNotFoundError(
            "reductions in steps and compression of device arrays are compiled for the device at "
            "hand, which takes NVRTC: pip install 'pycomm-collectives[cuda12]' (or [cuda13]); "
            f"what NCCL does itself needs no compiler ({error})"
        ) from error
    return nvrtc


def compile_kernels(architecture: str) -> bytes:
    """Return the kernels as machine code (cubin) for an architecture, such as ``"sm_90"``.

    Needs no device. For one that is newer than NVRTC, as PTX of the newest that NVRTC knows, which
    the driver compiles.

    Raises
    ------
    LibraryNotFoundError
        If there is no NVRTC.
    CommError
        If it refuses, with what it says.
    """
    nvrtc = _nvrtc()

    def checked(result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code):
            raise CommError(f"NVRTC refused to compile for {architecture}: {code}")
        return values[0] if values else None

    try:
        text = {name.encode(): source.encode() for name, source in sources().items()}
        main = text.pop(_MAIN.encode())
        program = checked(
            nvrtc.nvrtcCreateProgram(main, _MAIN.encode(), len(text), [*text.values()], [*text])
        )
    except RuntimeError as error:  # cuda-python without the library underneath
        raise LibraryNotFoundError(f"NVRTC cannot be loaded: {error}") from error
    known = [int(number) for number in checked(nvrtc.nvrtcGetSupportedArchs())]
    wanted = int(architecture.removeprefix("sm_"))
    as_ptx = wanted not in known
    if as_ptx:
        older = [number for number in known if number < wanted]
        if not older:
            raise CommError(
                f"this NVRTC compiles for sm_{min(known)} and newer, and the device is "
                f"{architecture}: an older one is needed (nvidia-cuda-nvrtc-cu12 before 13 knows "
                "sm_50 to sm_70)"
            )
        architecture = f"compute_{max(older)}"
    options = [word.encode() for word in (f"--gpu-architecture={architecture}", *_OPTIONS)]
    code = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(code):
        log = b" " * int(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        said = log.decode(errors="replace").strip(" \0\n")
        raise CommError(f"NVRTC refused to compile for {architecture} ({code}): {said}")
    kind = "PTX" if as_ptx else "CUBIN"
    image = b" " * int(checked(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
    checked(getattr(nvrtc, f"nvrtcGet{kind}")(program, image))
    nvrtc.nvrtcDestroyProgram(program)
    return image


def _cache_folder(environ: Mapping[str, str]) -> Path | None:
    base = environ.get("XDG_CACHE_HOME") or ""
    if not base and environ.get("HOME"):
        base = str(Path(environ["HOME"]) / ".cache")
    return Path(base) / "pycomm" if Path(base).is_absolute() else None


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _image(architecture: str) -> bytes:
    """Return the kernels for an architecture, from the cache if they are there."""
    folder = _cache_folder(os.environ)
    version = metadata.version("cuda-python") if _installed("cuda-python") else ""
    text = "\n".join((*sources().values(), architecture, version, *_OPTIONS))
    name = f"kernels-{architecture}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cubin"
    if folder is not None:
        with contextlib.suppress(OSError):
            return (folder / name).read_bytes()
    image = compile_kernels(architecture)
    if folder is not None:
        with contextlib.suppress(OSError):  # a home that cannot be written to is no failure
            folder.mkdir(parents=True, exist_ok=True)
            # Other ranks do the same: each writes a file of its own, and the last name stays.
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.write(image)
            Path(file.name).replace(folder / name)
    return image


@cache
def kernels_of(ordinal: int) -> "Kernels":
    """Return the kernels for a device, loaded once."""
    return Kernels(get_device(ordinal))


class Kernels:
    """The kernels, loaded on one device. All methods only give work to a stream.

    Pointers are addresses in its memory, aligned to their elements; `count` is a number of
    elements. The device's context must be the current one.
    """

    def __init__(self, device: Device) -> None:
        major, minor = device.capability
        image = _image(f"sm_{major}{minor}")
        module = ctypes.c_void_p()
        with device.entered():
            cuda.check(cuda.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
        self._module = module
        self._functions: dict[str, int] = {}
        processors = device.attribute(CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self._most_blocks = max(1, processors) * _BLOCKS_EACH

    def _launch(self, name: str, stream: int, count: int, *arguments: Any) -> None:
        if count == 0:
            return
        function = self._functions.get(name)
        if function is None:
            found = ctypes.c_void_p()
            code = cuda.cuModuleGetFunction(
                ctypes.byref(found), self._module, (_PREFIX + name).encode()
            )
            cuda.check(code, f"cuModuleGetFunction({name})")
            function = self._functions[name] = found.value or 0
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        blocks = min(self._most_blocks, -(-count // (_THREADS * _EACH)))
        code = cuda.cuLaunchKernel(
            function, blocks, 1, 1, _THREADS, 1, 1, 0, stream, pointers, None
        )
        if code:
            raise cuda.error(code, f"cuLaunchKernel({name})")

    def reduce(
        self,
        sources: Sequence[int],
        target: int,
        dtype: DType,
        op: Op,
        count: int,
        stream: int,
    ) -> None:
        """Combine sources, in their order, into `target`, which may be one of them.

        As `pycomm.kernels.host.reduce_arrays` does, and with the same bits.
        """
        if dtype.kind is Kind.COMPLEX:
            dtype, count = DTYPES[f"float{4 * dtype.itemsize}"], 2 * count
        elif dtype.kind is Kind.BOOL:
            op = ReduceOp.MAX if op in (ReduceOp.SUM, ReduceOp.MAX) else ReduceOp.MIN
            dtype = DTYPES["uint8"]
        kind = ReduceOp.SUM if isinstance(op, PremulSum) else op
        name = f"reduce_{kind}_{dtype.name}"
        if len(sources) > MOST_SOURCES and (kind is ReduceOp.AVG or dtype.kind is Kind.HALF):
            raise ArgumentTypeError(
                f"{dtype.name} {kind} of {len(sources)} ranks in one step: more than "
                f"{MOST_SOURCES} cannot be rounded once; use another algorithm"
            )
        left = list(sources)
        while left:
            part, left = left[:MOST_SOURCES], left[MOST_SOURCES:]
            if left:
                left.insert(0, target)
            self._launch(
                name, stream, count, ctypes.c_void_p(target), _pointers(part),
                ctypes.c_uint32(len(part)), ctypes.c_uint64(count),
            )  # fmt: skip

    def scale(
        self, source: int, target: int, dtype: DType, factor: complex, count: int, stream: int
    ) -> None:
        """Write products to `target`, which may be `source`; halves are rounded once."""
        given, written = ctypes.c_void_p(source), ctypes.c_void_p(target)
        if dtype.kind is Kind.COMPLEX:
            part = ctypes.c_float if dtype.itemsize == 8 else ctypes.c_double
            value = complex(factor)
            self._launch(
                f"turn_{dtype.name}", stream, count, written, given, part(value.real),
                part(value.imag), ctypes.c_uint64(count),
            )  # fmt: skip
            return
        number: Any
        if dtype.kind is Kind.INT:
            assert isinstance(factor, int)
            # Wraps, as the products do: 64 bits hold what an unsigned factor needs.
            number = ctypes.c_int64(ctypes.c_uint64(factor).value)
        else:
            try:
                real = float(factor.real)
            except OverflowError:  # a whole number that no float holds
                real = math.copysign(math.inf, factor.real)
            number = (ctypes.c_double if dtype.itemsize == 8 else ctypes.c_float)(real)
        self._launch(
            f"scale_{dtype.name}", stream, count, written, given, number, ctypes.c_uint64(count)
        )

    def divide(self, target: int, dtype: DType, divisor: int, count: int, stream: int) -> None:
        """Divide floats, or complex numbers, in place."""
        if dtype.kind is Kind.COMPLEX:
            dtype, count = DTYPES[f"float{4 * dtype.itemsize}"], 2 * count
        value = (ctypes.c_float if dtype.itemsize == 4 else ctypes.c_double)(divisor)
        self._launch(
            f"divide_{dtype.name}", stream, count, ctypes.c_void_p(target), value,
            ctypes.c_uint64(count),
        )  # fmt: skip

    def encode(
        self,
        form: str,
        source: int,
        target: int,
        count: int,
        stream: int,
        *,
        shift: int | None,
        saturate: bool,
        peaks: int,
        tally: int,
        residual: int,
    ) -> None:
        """Encode float32 as `Cast` does.

        Parameters
        ----------
        form : str
            The format.
        source, target : int
            float32 values, and what ``Cast.encoded_size`` says for them.
        shift : int or None
            ``2**shift`` values share a scale; None for no scales.
        saturate : bool
            Whether what is too large becomes the largest value.
        peaks : int
            With scales: room for a uint32 for each block.
        tally : int
            Two uint64, to which the numbers of too large values, and of dropped errors, are added.
        residual : int
            float32 values that are added before, and receive the rounding errors; 0 for none.
        """
        values = ctypes.c_uint64(count)
        blocks = ctypes.c_uint32(32 if shift is None else shift)
        given, kept = ctypes.c_void_p(source), ctypes.c_void_p(residual)
        if shift is not None and count:
            cuda.check(
                cuda.cuMemsetD32Async(peaks, 0, -(-count >> shift), stream), "cuMemsetD32Async"
            )
            self._launch(
                "peaks", stream, count, ctypes.c_void_p(peaks), given, kept, values, blocks
            )
        self._launch(
            f"encode_{form}", stream, count, ctypes.c_void_p(target), ctypes.c_void_p(peaks),
            given, kept, ctypes.c_void_p(tally), values, blocks, ctypes.c_uint32(saturate),
        )  # fmt: skip

    def decode(
        self, form: str, source: int, target: int, count: int, stream: int, *, shift: int | None
    ) -> None:
        """Write encoded values as float32."""
        self._launch(
            f"decode_{form}", stream, count, ctypes.c_void_p(target), ctypes.c_void_p(source),
            ctypes.c_uint64(count), ctypes.c_uint32(32 if shift is None else shift),
        )  # fmt: skip

    def add_up(
        self,
        form: str,
        come: Sequence[int],
        index: int,
        own: int,
        total: int,
        divisor: float,
        count: int,
        stream: int,
        *,
        shift: int | None,
    ) -> None:
        """Add up what ranks have encoded, in their order; those of `index` are `own`, as they are.

        Raises
        ------
        ArgumentTypeError
            If there are more ranks than one kernel can take.
        """
        if len(come) > MOST_SOURCES:
            raise ArgumentTypeError(
                f"compression of device arrays is for up to {MOST_SOURCES} ranks, not {len(come)}"
            )
        self._launch(
            f"add_up_{form}", stream, count, ctypes.c_void_p(total), _pointers(come),
            ctypes.c_void_p(own), ctypes.c_uint32(len(come)), ctypes.c_uint32(index),
            ctypes.c_float(divisor), ctypes.c_uint64(count),
            ctypes.c_uint32(32 if shift is None else shift),
        )  # fmt: skip


def _pointers(addresses: Sequence[int]) -> _Sources:
    sources = _Sources()
    for place, address in enumerate(addresses):
        sources.at[place] = address
    return sources

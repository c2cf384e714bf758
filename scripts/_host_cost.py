"""What a call on a device array costs on the host; ``scripts/bench-host-cost --help``.

Two libraries are compiled that stand in for the driver and NCCL: every function of the tables in
`pycomm.bindings` returns success at once. A fresh process loads them, makes a communicator of one
rank, and measures what Python does around the call of NCCL: all rows in turn, round after round,
so that a slow moment of the machine touches all of them alike. nccl4py is measured on the same
stubs where it is installed.
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pycomm
from pycomm import dlpack
from pycomm.bindings import cuda as cuda_table
from pycomm.bindings import nccl as nccl_table
from pycomm.bindings._table import Row, read_rows
from pycomm.dtypes import DTYPES

__all__ = ["main", "stub_source"]

_NCCL, _CUDA = "libnccl.so.2", "libcuda.so.1"
_BARE = "no context current"
_COUNT = 1024  # float32 elements; nothing reads them

_HEAD = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define OUT __attribute__((visibility("default")))
typedef struct { char internal[128]; } ncclUniqueId;
static char context[64], communicator[64], stream[64], event[64], other[64];
static void *current = context;
static int taken(void **p, size_t size) {
    *p = aligned_alloc(4096, (size + 4096) / 4096 * 4096);
    return *p ? 0 : 2;
}
OUT int nothing_to_do(void) { return 0; }
"""

# What has to answer with more than success: parameters, and what is done.
_NCCL_ANSWERS = {
    "ncclGetVersion": ("int *v", "*v = 23203; return 0;"),
    "ncclGetErrorString": ("int code", '(void)code; return "stub";'),
    "ncclGetLastError": ("void *c", '(void)c; return "";'),
    "ncclGetUniqueId": ("ncclUniqueId *id", "memset(id, 1, sizeof *id); return 0;"),
    "ncclCommInitRank": (
        "void **c, int n, ncclUniqueId i, int r",
        "(void)n; (void)i; (void)r; *c = communicator; return 0;",
    ),
    "ncclCommInitRankConfig": (
        "void **c, int n, ncclUniqueId i, int r, void *s",
        "(void)n; (void)i; (void)r; (void)s; *c = communicator; return 0;",
    ),
    "ncclCommInitRankScalable": ("void **c", "*c = communicator; return 0;"),
    "ncclCommSplit": (
        "void *c, int color, int key, void **made",
        "(void)c; (void)color; (void)key; *made = communicator; return 0;",
    ),
    "ncclCommCount": ("void *c, int *n", "(void)c; *n = 1; return 0;"),
    "ncclCommCuDevice": ("void *c, int *n", "(void)c; *n = 0; return 0;"),
    "ncclCommUserRank": ("void *c, int *n", "(void)c; *n = 0; return 0;"),
    "ncclCommGetAsyncError": ("void *c, int *e", "(void)c; *e = 0; return 0;"),
    "ncclMemAlloc": ("void **p, size_t size", "return taken(p, size);"),
    "ncclMemFree": ("void *p", "free(p); return 0;"),
    "ncclRedOpCreatePreMulSum": ("int *op", "*op = 5; return 0;"),
    "ncclCommRegister": (
        "void *c, void *b, size_t n, void **h",
        "(void)c; (void)b; (void)n; *h = other; return 0;",
    ),
    "ncclCommWindowRegister": (
        "void *c, void *b, size_t n, void **h",
        "(void)c; (void)b; (void)n; *h = other; return 0;",
    ),
}
_CUDA_ANSWERS = {
    "cuDriverGetVersion": ("int *v", "*v = 12090; return 0;"),
    "cuDeviceGetCount": ("int *n", "*n = 1; return 0;"),
    "cuDeviceGet": ("int *d, int n", "*d = n; return 0;"),
    "cuDeviceGetName": ("char *s, int n", 'strncpy(s, "stub", n); return 0;'),
    "cuDeviceGetPCIBusId": ("char *s, int n", 'strncpy(s, "0000:00:00.0", n); return 0;'),
    "cuDeviceGetUuid": ("char *u", "memset(u, 1, 16); return 0;"),
    "cuDeviceGetUuid_v2": ("char *u", "memset(u, 1, 16); return 0;"),
    "cuDeviceGetAttribute": ("int *v, int which", "*v = which == 75 ? 9 : 1; return 0;"),
    "cuDeviceTotalMem_v2": ("size_t *n", "*n = (size_t)1 << 36; return 0;"),
    "cuMemGetInfo_v2": ("size_t *f, size_t *n", "*f = *n = (size_t)1 << 36; return 0;"),
    "cuDevicePrimaryCtxRetain": ("void **c", "*c = context; return 0;"),
    "cuDevicePrimaryCtxGetState": (
        "int d, unsigned *f, int *a",
        "(void)d; *f = 0; *a = 1; return 0;",
    ),
    "cuCtxGetCurrent": ("void **c", "*c = current; return 0;"),
    "cuCtxGetDevice": ("int *d", "*d = 0; return 0;"),
    "cuCtxSetCurrent": ("void *c", "current = c; return 0;"),
    "cuCtxPopCurrent_v2": ("void **c", "*c = context; return 0;"),
    "cuStreamGetCtx": ("void *s, void **c", "(void)s; *c = context; return 0;"),
    "cuStreamCreate": ("void **s", "*s = stream; return 0;"),
    "cuStreamCreateWithPriority": ("void **s", "*s = stream; return 0;"),
    "cuStreamIsCapturing": ("void *s, int *c", "(void)s; *c = 0; return 0;"),
    "cuEventCreate": ("void **e", "*e = event; return 0;"),
    "cuMemAlloc_v2": ("void **p, size_t size", "return taken(p, size);"),
    "cuMemAllocAsync": ("void **p, size_t size", "return taken(p, size);"),
    "cuMemHostAlloc": ("void **p, size_t size", "return taken(p, size);"),
    "cuMemFree_v2": ("void *p", "free(p); return 0;"),
    "cuMemFreeAsync": ("void *p", "free(p); return 0;"),
    "cuMemFreeHost": ("void *p", "free(p); return 0;"),
    "cuMemcpyHtoD_v2": ("void *t, void *s, size_t n", "memcpy(t, s, n); return 0;"),
    "cuMemcpyDtoH_v2": ("void *t, void *s, size_t n", "memcpy(t, s, n); return 0;"),
    # Memory of device 0, whatever the pointer: 2 is device memory, 9 the number of the device.
    "cuPointerGetAttribute": (
        "void *data, int which",
        "if (which == 1) *(void **)data = context; else *(int *)data = which == 2 ? 2 : 0;"
        " return 0;",
    ),
    "cuPointerGetAttributes": (
        "unsigned n, int *which, void **data",
        "for (unsigned i = 0; i < n; i++) if (data[i]) {"
        " if (which[i] == 1) *(void **)data[i] = context;"
        " else if (which[i] == 3 || which[i] == 4) *(void **)data[i] = 0;"
        " else *(int *)data[i] = which[i] == 2 ? 2 : 0; } return 0;",
    ),
    "cuGetErrorName": ("int code, const char **s", '(void)code; *s = "STUB"; return 0;'),
    "cuGetErrorString": ("int code, const char **s", '(void)code; *s = "stub"; return 0;'),
}
# cuda.core asks the driver for its functions by their names without versions.
_ASKED = """
static const struct { const char *name; void *function; } functions[] = {
%s
    {0, 0}};
OUT int cuGetProcAddress_v2(
    const char *name, void **found, int version, uint64_t flags, int *status) {
    (void)version; (void)flags;
    if (status) *status = 0;
    *found = (void *)nothing_to_do;
    for (int i = 0; functions[i].name; i++)
        if (strcmp(functions[i].name, name) == 0) *found = functions[i].function;
    return 0;
}
OUT int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version, flags, 0);
}
"""


def stub_source(rows: list[Row], answers: Mapping[str, tuple[str, str]]) -> str:
    """Return C of a library with these functions; all succeed, and some have an answer."""
    missing = answers.keys() - {row.name for row in rows}
    if missing:
        raise ValueError(f"no rows for {', '.join(sorted(missing))}")
    lines = [_HEAD]
    for row in rows:
        parameters, body = answers.get(row.name, ("void", "return 0;"))
        kind = "const char *" if row.result == "const char*" else "int "
        lines.append(f"OUT {kind}{row.name}({parameters}) {{ {body} }}")
    return "\n".join(lines) + "\n"


def build(folder: Path) -> None:
    """Compile both stubs into a folder.

    Raises
    ------
    OSError, subprocess.CalledProcessError
        If there is no C compiler, or it refuses.
    """
    nccl_rows = list(read_rows(nccl_table.PROTOTYPES))
    cuda_rows = list(read_rows(cuda_table.PROTOTYPES))
    names = sorted((row.name.rpartition("_v")[0] or row.name, row.name) for row in cuda_rows)
    known = dict(names)  # the newest version of each name
    table = "\n".join(f'    {{"{name}", (void *){known[name]}}},' for name in known)
    for library, source in (
        (_NCCL, stub_source(nccl_rows, _NCCL_ANSWERS)),
        (_CUDA, stub_source(cuda_rows, _CUDA_ANSWERS) + _ASKED % table),
    ):
        file = folder / f"{library}.c"
        file.write_text(source)
        options = ["-O2", "-w", "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{library}"]
        line = ["cc", *options, "-o", str(folder / library), str(file)]
        subprocess.run(line, check=True)  # noqa: S603  # the compiler


class Interfaced:
    """An array with ``__cuda_array_interface__``, and nothing else."""

    def __init__(self, pointer: int, stream: int | None) -> None:
        self.pointer, self.stream = pointer, stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (_COUNT,),
            "typestr": "<f4",
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
            "stream": self.stream,
        }


class Packed:
    """An array with DLPack, and nothing else; it makes its capsules as fast as C would."""

    def __init__(self, base: Any) -> None:
        self._first = base.__dlpack__()  # which owns the description that all of them show
        self._address = _address_in(self._first, _DLPACK)
        dlpack._Legacy.from_address(self._address).deleter = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        return _new_capsule(self._address, _DLPACK, None)


_DLPACK = b"dltensor"
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
_address_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _nccl4py(x: Any, rows: dict[str, tuple[str, Any]]) -> str:
    """Add the rows of nccl4py; return what there is to say about it."""
    try:
        import nccl.core as peer
    except ImportError as error:
        return f"nccl4py is not measured: {error} (--python names an environment that has it)"
    try:
        comm = peer.Communicator.init(1, 0, peer.get_unique_id())
        call = "comm.allreduce(x, x, op, stream=stream)"
        given = {"comm": comm, "op": peer.SUM, "stream": 0}
        for kind, array in x.items():
            peer_call = given | {"x": array}
            timeit.Timer(call, globals=peer_call).timeit(1)
            rows[f"nccl4py allreduce(x, x), {kind}"] = call, peer_call
    except Exception as error:
        return f"nccl4py does not run on the stubs: {type(error).__name__}: {error}"
    return f"nccl4py {getattr(peer, '__version__', '')} on the same stubs".replace("  ", " ")


def _rows(comm: pycomm.Communicator) -> tuple[dict[str, tuple[str, Any]], str]:
    """Return what is measured, (statement, names) by title, and what was said about nccl4py."""
    from pycomm.bindings.nccl import nccl
    from pycomm.device_arrays import allocate
    from pycomm.devices import get_device
    from pycomm.streams import Stream

    device = get_device(0)
    x, out = (allocate(device, (_COUNT,), DTYPES["float32"]) for _ in range(2))
    own = Stream(device)
    arrays = {
        "DeviceArray": x,
        "interface, stream 1": Interfaced(x.pointer, 1),
        "interface, own stream": Interfaced(x.pointer, own.handle),
        "DLPack": Packed(x),
    }
    rows: dict[str, tuple[str, Any]] = {}
    for kind, array in arrays.items():
        rows[f"comm.all_reduce(x), {kind}"] = "comm.all_reduce(x)", {"comm": comm, "x": array}
    rows["comm.all_reduce(x), interface, new each time"] = (
        "comm.all_reduce(new(pointer, 1))",
        {"comm": comm, "new": Interfaced, "pointer": x.pointer},
    )
    rows["comm.all_reduce(x, out), DeviceArray"] = (
        "comm.all_reduce(x, out)",
        {"comm": comm, "x": x, "out": out},
    )
    rows["comm.all_reduce(x, stream=s), DeviceArray"] = (
        "comm.all_reduce(x, stream=s)",
        {"comm": comm, "x": x, "s": own},
    )
    rows[f"comm.all_reduce(x), DeviceArray, {_BARE}"] = "comm.all_reduce(x)", {"comm": comm, "x": x}
    plan = {"plan": comm.plan("all_reduce", x)}
    rows["plan()"] = rows[f"plan(), {_BARE}"] = "plan()", plan
    library = ctypes.CDLL(nccl.library.path)
    library.ncclAllReduce.restype, library.ncclAllReduce.argtypes = nccl.signature("ncclAllReduce")
    handle = comm.nccl_handle if hasattr(comm, "nccl_handle") else 0x1000
    numbers = (x.pointer, x.pointer, _COUNT, 7, 0, handle, own.handle)
    kinds = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
        ctypes.c_void_p, ctypes.c_void_p,
    )  # fmt: skip
    objects = tuple(kind(number) for kind, number in zip(kinds, numbers, strict=True))
    names = "abcdefg"
    listed = ", ".join(names)
    bare = {"function": library.ncclAllReduce, "nccl": nccl}
    for title, call, values in (
        ("ctypes, argtypes, ints", f"function({listed})", numbers),
        ("ctypes, argtypes, ready objects", f"function({listed})", objects),
        ("row nccl.ncclAllReduce, ints", f"nccl.ncclAllReduce({listed})", numbers),
        ("row nccl.ncclAllReduce, ready objects", f"nccl.ncclAllReduce({listed})", objects),
    ):
        rows[title] = call, bare | dict(zip(names, values, strict=True))
    return rows, _nccl4py(arrays, rows)


def _measure(rows: dict[str, tuple[str, Any]], repeats: int, rounds: int) -> dict[str, list[float]]:
    """Return nanoseconds of a call, of each round."""
    from pycomm.bindings.cuda import cuda
    from pycomm.devices import get_device

    context = get_device(0).context
    timers = {}
    for title, (call, names) in rows.items():
        # As with a framework around, whose context is the current one; or without.
        entered = {"enter": cuda.cuCtxSetCurrent, "context": 0 if _BARE in title else context}
        timers[title] = timeit.Timer(  # without gc
            call, "enter(context)", globals=names | entered, timer=time.perf_counter_ns
        )
    for timer in timers.values():
        timer.timeit(min(repeats, 200))
    found: dict[str, list[float]] = {title: [] for title in timers}
    for _ in range(rounds):
        for title, timer in timers.items():
            found[title].append(timer.timeit(repeats) / repeats)
    return found


def _child(options: argparse.Namespace) -> int:
    """Measure in this process, which finds the stubs."""
    ctypes.CDLL(_CUDA, mode=ctypes.RTLD_GLOBAL)
    with pycomm.init("local") as comm:
        rows, said = _rows(comm)
        found = _measure(rows, options.repeats, options.rounds)
    medians = {title: statistics.median(values) for title, values in found.items()}
    bare = medians["ctypes, argtypes, ints"]
    peer = medians.get("nccl4py allreduce(x, x), interface, stream 1")
    say(f"{'':<50}{'median':>9}{'least':>9}{'/ ctypes':>10}{'/ nccl4py':>11}")
    for title, median in medians.items():
        part = "-" if peer is None else f"{median / peer:.3f}"
        say(f"{title:<50}{median:>9.0f}{min(found[title]):>9.0f}{median / bare:>10.2f}{part:>11}")
    say(f"ns of a call; {options.rounds} rounds of {options.repeats} calls, all rows in turn")
    say(said)
    say(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs")
    if options.json:
        report = {
            "unit": "ns", "rounds": options.rounds, "repeats": options.repeats,
            "python": platform.python_version(), "machine": platform.machine(),
            "nccl4py": said, "medians": medians, "rounds_ns": found,
        }  # fmt: skip
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def say(text: str) -> None:
    """Print a line."""
    print(text, flush=True)  # noqa: T201  # this is a command line


def main(argv: list[str]) -> int:
    """Compile the stubs, and measure in a process that finds them."""
    parser = argparse.ArgumentParser(prog="scripts/bench-host-cost", description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000, help="calls of a round (2000)")
    parser.add_argument("--rounds", type=int, default=31, help="rounds (31)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers")
    parser.add_argument("--python", default=sys.executable, help="the Python that measures")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.repeats < 1 or options.rounds < 1:
        parser.error("--repeats and --rounds are at least 1")
    if options.measure:
        return _child(options)
    with tempfile.TemporaryDirectory(prefix="pycomm-stubs-") as name:
        build(Path(name))
        environ = os.environ | {
            "LD_LIBRARY_PATH": ":".join(filter(None, (name, os.environ.get("LD_LIBRARY_PATH")))),
            "PYCOMM_NCCL_LIB": str(Path(name, _NCCL)),
        }
        line = [options.python, str(Path(__file__).resolve()), "--measure", *argv]
        return subprocess.run(line, env=environ, check=False).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The tables in use: what arrives in C, what an old library lacks, what the real one says."""

import ctypes
import json
import os
import pickle
import subprocess
import sys
import textwrap
from ctypes import POINTER, byref, c_char_p, c_int, c_void_p, cast

import pytest
from support import abi

from pycomm import errors
from pycomm.bindings import cuda as cuda_module
from pycomm.bindings import nccl as nccl_module
from pycomm.bindings._library import Library
from pycomm.bindings._table import C_TYPES, Row, find_ctype, read_rows
from pycomm.bindings.cuda import CUDA, cuda
from pycomm.bindings.nccl import NCCL, nccl
from pycomm.bindings.nccl_types import ncclResult_t, ncclUniqueId

needs_compiler = pytest.mark.skipif(abi.compiler() is None, reason="no C compiler `cc`")

TABLES = {
    "nccl": (NCCL, nccl_module.PROTOTYPES, nccl_module.TYPES),
    "cuda": (CUDA, cuda_module.PROTOTYPES, cuda_module.TYPES),
}
HIGHEST = 2**47 - 8  # an address of a user's process on x86-64
SLOT = 128  # bytes for one argument in the echo


def open_table(library, handle, version="9.9.9"):
    kind, prototypes, types = TABLES[library]
    found = Library(f"lib{library}", "/somewhere/lib.so", version, "a test")
    return kind(prototypes, types, lambda: (found, handle))


def build(folder, text, *options):
    source, target = folder / "stub.c", folder / "libstub.so"
    source.write_text(text)
    abi.compile_c(source, target, abi.include_folders(), "-shared", "-fPIC", *options)
    return ctypes.CDLL(str(target))


class TestReader:
    def test_one_spelling_of_each_type(self):
        text = "ncclResult_t  ncclF( const void *a,\n const char ** b,unsigned  int c ); void g();"
        one, other = read_rows({"2.5": text})
        kinds = (("const void*", "a"), ("const char**", "b"), ("unsigned int", "c"))
        assert one == Row("2.5", "ncclF", "ncclResult_t", kinds)
        assert one.prototype == "ncclResult_t ncclF(const void* a, const char** b, unsigned int c)"
        assert other.prototype == "void g(void)"

    @pytest.mark.parametrize("text", ["int f(int);", "int f(void*);", "int x;", "f(int a);"])
    def test_what_cannot_be_read_is_an_error(self, text):
        with pytest.raises(ValueError, match=r"not a declaration|without a type or a name"):
            list(read_rows({"1.0": text}))

    def test_an_unknown_type_is_an_error(self):
        with pytest.raises(ValueError, match="unknown C type ssize_t"):
            find_ctype("ssize_t", C_TYPES)

    @pytest.mark.parametrize("library", list(TABLES))
    def test_every_row_has_types_and_one_place(self, library):
        kind, prototypes, types = TABLES[library]
        rows = list(read_rows(prototypes))
        table = kind(prototypes, types, lambda: pytest.fail("loaded"))
        assert len(rows) == len(table.rows), "one function in two versions"
        versions = [tuple(map(int, since.split("."))) for since in prototypes]
        assert versions == sorted(versions)
        for name in table.rows:
            result, arguments = table.signature(name)
            assert result in (c_int, c_char_p, None)
            for argument in arguments:
                assert not issubclass(argument, ctypes.Array), "passed as a pointer (B35)"


@pytest.fixture(scope="module", params=list(TABLES))
def echo(request, tmp_path_factory):
    _, prototypes, types = TABLES[request.param]
    lines = ["#include <cuda.h>", "#include <nccl.h>", "#include <string.h>"]
    lines.append("unsigned char echo[64][128]; int calls;")
    rows = {row.name: row for row in read_rows(prototypes)}
    for row in rows.values():
        kept = "".join(
            f"memcpy(echo[{at}], &{name}, sizeof {name});"
            for at, (_, name) in enumerate(row.parameters)
        )
        answer = {"void": "", "const char*": 'return "echo";'}.get(row.result, "return 77;")
        lines.append(f"{row.prototype} {{ calls++; {kept} {answer} }}")
    handle = build(tmp_path_factory.mktemp(request.param), "\n".join(lines))
    return open_table(request.param, handle), types, handle


@needs_compiler
class TestArguments:
    """Every bound function of both tables, against a stub that keeps what it was given."""

    def test_all_arrive_whole(self, echo):
        table, types, handle = echo
        kept = (ctypes.c_ubyte * (64 * SLOT)).in_dll(handle, "echo")
        calls = c_int.in_dll(handle, "calls")
        for row in table.rows.values():
            values = [made(kind, at, types) for at, (kind, _) in enumerate(row.parameters)]
            ctypes.memset(kept, 0xEE, len(kept))
            before = calls.value
            result = getattr(table, row.name)(*(value for value, _ in values))
            assert calls.value == before + 1
            assert result == {"void": None, "const char*": b"echo"}.get(row.result, 77)
            for at, (_, wanted) in enumerate(values):
                got = bytes(kept[at * SLOT : at * SLOT + len(wanted)])
                assert got == wanted, (row.prototype, at)
                # And not one byte more than the type has.
                assert set(kept[at * SLOT + len(wanted) : (at + 1) * SLOT]) <= {0xEE}

    def test_an_address_may_come_in_many_forms(self, echo):
        table, _, handle = echo
        row = table.rows.get("ncclMemFree") or table.rows["cuMemFreeHost"]
        kept = (ctypes.c_ubyte * 8).in_dll(handle, "echo")
        number, room = c_int(), (c_int * 3)()
        call = getattr(table, row.name)
        for given, wanted in [
            (byref(number), ctypes.addressof(number)),
            (ctypes.pointer(number), ctypes.addressof(number)),
            (room, ctypes.addressof(room)),
            (c_void_p(HIGHEST), HIGHEST),
            (None, 0),
        ]:
            call(given)
            assert int.from_bytes(kept, sys.byteorder) == wanted
        for wrong in (1.5, c_int(5)):
            with pytest.raises(ctypes.ArgumentError):
                call(wrong)


def made(kind, at, types):
    """Return a value of a C type that shows every bit, and its bytes in memory."""
    ctype = find_ctype(kind, types)
    address = HIGHEST - 16 * at
    raw = address.to_bytes(8, sys.byteorder)
    if ctype is ncclUniqueId:
        data = bytes((7 * at + i) % 255 for i in range(128))
        return ncclUniqueId.from_buffer_copy(data), data
    if ctype is c_void_p:
        return address, raw
    if ctype is c_char_p:
        return cast(c_void_p(address), c_char_p), raw
    if hasattr(ctype, "contents"):
        return cast(c_void_p(address), POINTER(ctype._type_)), raw
    if issubclass(ctype, ctypes._CFuncPtr):
        return ctype(address), raw
    bits = 8 * ctypes.sizeof(ctype)
    if kind == "size_t":
        value = 2**33 + at
    elif kind == "CUdeviceptr":
        value = address
    elif ctype is c_int:
        value = -(2**31) + at if at % 2 else 2**31 - 1 - at
    else:
        value = 2**bits - 1 - at
    return value, value.to_bytes(bits // 8, sys.byteorder, signed=value < 0)


@needs_compiler
class TestTable:
    OLD = """
        int ncclGetVersion(int* version) { *version = 21803; return 0; }
        const char* ncclGetErrorString(int code) { return "no luck"; }
    """

    @pytest.fixture
    def old(self, tmp_path):
        return open_table("nccl", build(tmp_path, self.OLD), "2.18.3")

    def test_a_function_is_the_bare_one_and_kept(self, old):
        """The cost is that of ctypes by construction: nothing of ours is in between."""
        assert "ncclGetVersion" not in vars(old)
        function = old.ncclGetVersion
        assert isinstance(function, ctypes._CFuncPtr)
        assert vars(old)["ncclGetVersion"] is function is old.ncclGetVersion
        assert function.argtypes == [c_void_p]
        assert not type(function)._flags_ & ctypes._FUNCFLAG_PYTHONAPI, "the GIL is released"
        code = c_int()
        assert function(byref(code)) == 0
        assert code.value == 21803

    def test_what_an_old_library_lacks(self, old):
        assert not old.has("ncclCommShrink")
        assert old.has("ncclGetVersion")
        with pytest.raises(errors.UnsupportedError) as caught:
            _ = old.ncclCommShrink
        assert str(caught.value) == (
            "ncclCommShrink is not in libnccl 2.18.3 (/somewhere/lib.so):"
            " NCCL 2.27 is the first that has it"
        )
        assert old.version == (2, 18, 3)

    def test_what_an_old_driver_lacks(self, tmp_path):
        handle = build(tmp_path, "int cuInit(unsigned flags) { return 0; }")
        old = open_table("cuda", handle, "11.0")
        with pytest.raises(errors.UnsupportedError, match=r"libcuda 11\.0.*CUDA 11\.2 is the firs"):
            _ = old.cuMemAllocAsync

    def test_an_unknown_name_is_an_attribute_error(self):
        table = open_table("nccl", None)
        for name in ("ncclAllreduce", "__deepcopy__", "_nothing"):
            with pytest.raises(AttributeError, match=name):
                getattr(table, name)

    def test_an_error_without_words_of_the_library(self, old, monkeypatch):
        monkeypatch.setenv("NCCL_DEBUG", "WARN")
        error = old.error(3, "ncclAllReduce")
        assert str(error) == "ncclAllReduce failed: ncclInternalError (3): no luck"
        assert (error.code, error.function, error.last_error) == (3, "ncclAllReduce", None)

    def test_reset_forgets(self, old):
        assert old.ncclGetVersion
        old.reset()
        assert "ncclGetVersion" not in vars(old)
        assert old.has("ncclGetVersion")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    text = """
        const char* ncclGetErrorString(int code) { return code == 6 ? "gone" : "bad"; }
        const char* ncclGetLastError(void* comm) { return comm == (void*)9 ? "peer 3" : ""; }
    """
    return open_table("nccl", build(tmp_path_factory.mktemp("e"), text))


@needs_compiler
class TestErrors:
    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            (1, errors.NCCLUnhandledCudaError),
            (2, errors.NCCLSystemError),
            (3, errors.NCCLInternalError),
            (4, errors.NCCLInvalidArgumentError),
            (5, errors.NCCLInvalidUsageError),
            (6, errors.NCCLRemoteError),
            (7, errors.NCCLError),
            (8, errors.NCCLTimeoutError),
            (99, errors.NCCLError),
        ],
    )
    def test_one_class_for_each_code(self, table, code, kind, monkeypatch):
        monkeypatch.delenv("NCCL_DEBUG", raising=False)
        with pytest.raises(errors.NCCLError) as caught:
            table.check(code, "ncclSend", 9)
        error = pickle.loads(pickle.dumps(caught.value))
        assert type(error) is kind
        assert (error.code, error.function, error.last_error) == (code, "ncclSend", "peer 3")
        assert isinstance(error, errors.CommTimeoutError) == (code == 8)
        name = ncclResult_t(code).name if code < 9 else "code"
        assert str(error).startswith(f"ncclSend failed: {name} ({code}): ")
        assert "the last that NCCL had to say: peer 3" in str(error)
        assert "NCCL_DEBUG=INFO" in str(error)

    def test_success_and_progress(self, table):
        table.check(0, "ncclSend")
        table.check(7, "ncclSend", in_progress=True)
        with pytest.raises(errors.NCCLError, match="ncclInProgress"):
            table.check(7, "ncclSend")
        with pytest.raises(errors.NCCLSystemError):
            table.check(2, "ncclSend", in_progress=True)

    def test_every_result_has_its_class(self):
        plain = {"ncclSuccess", "ncclInProgress", "ncclNumResults"}
        named = {code.name for code in ncclResult_t if code in nccl_module._ERRORS}
        assert named == set(ncclResult_t.__members__) - plain

    def test_the_driver(self, tmp_path):
        text = """
            int cuGetErrorName(int code, const char** text)
            { *text = "CUDA_ERROR_OUT_OF_MEMORY"; return code == 2 ? 0 : 1; }
            int cuGetErrorString(int code, const char** text)
            { *text = "out of memory"; return code == 2 ? 0 : 1; }
        """
        table = open_table("cuda", build(tmp_path, text))
        table.check(0, "cuInit")
        with pytest.raises(errors.CUDAError) as caught:
            table.check(2, "cuMemAlloc_v2")
        error = pickle.loads(pickle.dumps(caught.value))
        assert str(error) == "cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
        assert (error.code, error.name) == (2, "CUDA_ERROR_OUT_OF_MEMORY")
        assert error.function == "cuMemAlloc_v2"
        assert str(table.error(600, "f")) == "f failed: CUDA_ERROR_NOT_READY (600)"
        assert str(table.error(12345, "f")) == "f failed: code (12345)"


REAL = """
import ctypes, json
from ctypes import byref, c_int, c_void_p
from pycomm import errors
from pycomm.bindings.nccl import nccl
from pycomm.bindings.nccl_types import config, ncclUniqueId

said = {}
def attempt(name, *arguments):
    code = getattr(nccl, name)(*arguments)
    try:
        nccl.check(code, name)
        said[name] = ["", ""]
    except errors.NCCLError as error:
        said[name] = [type(error).__name__, str(error)]

version = c_int()
attempt("ncclGetVersion", byref(version))
ids = [ncclUniqueId(), ncclUniqueId()]
for one in ids:
    attempt("ncclGetUniqueId", byref(one))
said["ids"] = [bytes(one).hex() for one in ids]
said["version"] = [version.value, nccl.library.version]
said["strings"] = [nccl.ncclGetErrorString(code).decode() for code in range(10)]
attempt("ncclCommCount", None, byref(c_int()))
attempt("ncclGroupEnd")
attempt("ncclMemAlloc", byref(c_void_p()), 2**33)
comm = c_void_p()
settings = config(blocking=0)
attempt("ncclCommInitRankConfig", byref(comm), 1, ids[0], 0, byref(settings))
said["comm"] = comm.value
table, count = c_void_p(), c_int()
attempt("ncclParamGetAllParameterKeys", byref(table), byref(count))
keys = ctypes.cast(table, ctypes.POINTER(ctypes.c_char_p))[:count.value]
said["keys"] = [key.decode() for key in keys]
value, length = ctypes.c_char_p(), c_int()
attempt("ncclParamGetParameter", b"NCCL_DEBUG_SUBSYS", byref(value), byref(length))
said["value"] = (value.value or b"").decode()
said["missing"] = [name for name in nccl.rows if not nccl.has(name)]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")}
    environment |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG_SUBSYS": "BOOTSTRAP"}
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REAL)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "LibraryNotFoundError" in answer.stderr:
        pytest.skip("no libnccl here")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


class TestRealLibrary:
    """libnccl out of its wheel, on a machine without a GPU; in a process, as it starts threads."""

    def test_version_and_strings(self, said):
        code, text = said["version"]
        assert code == int("{}{:02}{:02}".format(*map(int, text.split("."))))
        assert said["strings"][0] == "no error"
        assert said["strings"][9] == "unknown result code"

    def test_unique_ids(self, said):
        one, other = map(bytes.fromhex, said["ids"])
        assert len(one) == len(other) == 128
        assert one != other

    def test_wrong_arguments_and_wrong_usage(self, said):
        kind, text = said["ncclCommCount"]
        assert kind == "NCCLInvalidArgumentError"
        assert "CommCount : comm argument is NULL" in text
        assert said["ncclGroupEnd"][0] == "NCCLInvalidUsageError"

    def test_parameters(self, said):
        assert said["ncclParamGetAllParameterKeys"] == ["", ""]
        assert "NCCL_DEBUG_SUBSYS" in said["keys"]
        assert said["value"] == "BOOTSTRAP"

    def test_it_has_every_function(self, said):
        if said["version"][0] < 23200:
            pytest.skip("an older one")
        assert said["missing"] == []

    def test_without_a_gpu_init_fails_and_says_what_to_look_at(self, said):
        if not said["ncclMemAlloc"][0]:
            pytest.skip("there is a GPU")
        for name in ("ncclMemAlloc", "ncclCommInitRankConfig"):
            kind, text = said[name]
            assert kind == "NCCLUnhandledCudaError"
            assert text.startswith(f"{name} failed: ncclUnhandledCudaError (1): unhandled cuda err")
            assert "`pycomm info` shows the CUDA driver" in text
            assert "NCCL_DEBUG=INFO" in text
        assert said["comm"] is None


def test_the_tables_of_the_process():
    assert isinstance(nccl, NCCL)
    assert isinstance(cuda, CUDA)
    assert nccl.provider == "NCCL"

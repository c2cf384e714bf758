"""Which libnccl is loaded, which are refused, and what the refusal says.

A library that is loaded stays, so that each case has a process of its own.
"""

import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import abi

from pycomm.bindings import _elf
from pycomm.bindings._elf import find_fault
from pycomm.bindings._library import mapped_paths, nccl_candidates

needs_compiler = pytest.mark.skipif(abi.compiler() is None, reason="no C compiler `cc`")

# Hides the wheel of this environment; what the test gives is in its place.
PRELUDE = """
import ctypes, os, sys
import pycomm.bindings._library as library
from pycomm.bindings.cuda import cuda
from pycomm.bindings.nccl import nccl
library._wheel_folders = lambda package: sys.argv[1:]
"""


def in_new_process(code, *wheel, **variables):
    """Run code; return what it printed, or the name and text of its error."""
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": os.environ["PATH"]}
    environment |= {name: str(value) for name, value in variables.items()}
    guarded = PRELUDE + "try:\n" + textwrap.indent(textwrap.dedent(code), "    ")
    guarded += "\nexcept Exception as error:\n    print(type(error).__name__ + ':', error)\n"
    answer = subprocess.run(
        [sys.executable, "-c", guarded, *map(str, wheel)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, (answer.returncode, answer.stderr)
    return answer.stdout.strip()


SHOW = "print(nccl.library.version, nccl.library.path, nccl.library.owner, sep='|')\n"


@pytest.fixture
def build(tmp_path):
    """Return a function that builds a libnccl of some version at some place."""

    def one(place, version, name="libnccl.so.2", soname="libnccl.so.2"):
        source, target = tmp_path / f"{version}.c", tmp_path / place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(f"int ncclGetVersion(int *v) {{ *v = {version}; return 0; }}")
        abi.compile_c(source, target, (), "-shared", "-fPIC", f"-Wl,-soname,{soname}")
        return target

    return one


def skip_unless_missing(said):
    if not said.startswith("LibraryNotFoundError"):
        pytest.skip("this system has a libnccl of its own")


class TestNothingThere:
    def test_import_works_and_first_use_names_every_place(self, tmp_path):
        """B37: nothing is swallowed at import; the error comes where the library is needed."""
        said = in_new_process("import pycomm\nprint('imported')\n" + SHOW, tmp_path)
        first, text = said.split("\n", 1)
        skip_unless_missing(text)
        assert first == "imported"
        assert text.startswith("LibraryNotFoundError: libnccl not found (pip install nvidia-nccl")
        for tried in (f"{tmp_path}/lib/libnccl.so.2 (the nvidia-nccl wheel)", "libnccl.so.2 (the"):
            assert f"\n  {tried}" in text
        assert text.count("cannot open shared object file") == 3

    def test_a_function_of_the_driver(self):
        said = in_new_process("library._read_maps = str\nprint(cuda.cuInit(0))")
        if "LibraryNotFoundError" not in said:
            pytest.skip("there is a driver")
        assert "libcuda not found (the NVIDIA driver provides it)" in said
        assert "/usr/lib/wsl/lib/libcuda.so.1" in said

    def test_a_variable_that_names_nothing(self):
        said = in_new_process(SHOW, PYCOMM_NCCL_LIB="/nowhere/libnccl.so.2")
        assert said.startswith("LibraryNotFoundError: PYCOMM_NCCL_LIB=/nowhere/libnccl.so.2: no s")

    def test_a_variable_may_name_a_file_of_this_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("libnccl.so.2").touch()
        found = nccl_candidates({"PYCOMM_NCCL_LIB": "libnccl.so.2"}, None, [])
        assert found == [(f"{tmp_path}/libnccl.so.2", "PYCOMM_NCCL_LIB")]

    @needs_compiler
    def test_a_library_that_is_another_one(self, build, tmp_path):
        """The variable is the only candidate: no other is loaded behind the user's back."""
        other, _ = tmp_path / "libother.so", build("wheel/lib", 22705)
        source = tmp_path / "other.c"
        source.write_text("int nothing;")
        abi.compile_c(source, other, (), "-shared", "-fPIC")
        said = in_new_process(SHOW, tmp_path / "wheel", PYCOMM_NCCL_LIB=other)
        assert said.startswith("LibraryNotFoundError")
        assert "undefined symbol: ncclGetVersion" in said


@needs_compiler
class TestOneOnly:
    """B39: a process holds one libnccl."""

    def test_a_mapped_one_is_used_and_named(self, build, tmp_path):
        theirs = build("framework", 21803)
        build("wheel/lib", 22705)
        said = in_new_process(f"ctypes.CDLL({str(theirs)!r})\n" + SHOW, tmp_path / "wheel")
        assert said == f"2.18.3|{theirs}|mapped by this process"

    def test_the_table_calls_the_copy_that_was_named(self, build, tmp_path):
        theirs = build("framework", 21803)
        build("wheel/lib", 22705)
        code = f"""
        ctypes.CDLL({str(theirs)!r})
        version = ctypes.c_int()
        nccl.ncclGetVersion(ctypes.byref(version))
        print(version.value, len(library.mapped_paths(library._read_maps(), "libnccl.so")))
        """
        assert in_new_process(code, tmp_path / "wheel") == "21803 1"

    def test_a_variable_that_names_another_is_refused(self, build, tmp_path):
        theirs = build("site-packages/framework/lib", 21803)
        mine = build("mine", 22705)
        code = f"ctypes.CDLL({str(theirs)!r})\n" + SHOW
        said = in_new_process(code, PYCOMM_NCCL_LIB=mine)
        assert said.startswith("LibraryConflictError: ")
        assert f"PYCOMM_NCCL_LIB={mine}" in said
        assert f"{theirs} (of the package framework)" in said
        assert "\n" not in said

    @pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
    def test_a_variable_that_names_the_same_file_is_fine(self, build, tmp_path, link):
        theirs, mine = build("framework", 21803), tmp_path / "libmine.so"
        getattr(mine, link)(theirs)
        said = in_new_process(f"ctypes.CDLL({str(theirs)!r})\n" + SHOW, PYCOMM_NCCL_LIB=mine)
        assert said == f"2.18.3|{theirs}|mapped by this process"

    def test_two_that_are_mapped_are_refused(self, build):
        both = [build("a/nvidia", 21803), build("b", 22705, soname="libnccl.so.3")]
        code = "".join(f"ctypes.CDLL({str(one)!r})\n" for one in both)
        said = in_new_process(code + SHOW)
        assert said.startswith("LibraryConflictError: this process has mapped more than one")
        for one in both:
            assert str(one) in said

    def test_the_one_of_the_variable_stays_ours(self, build, tmp_path):
        mine = build("mine", 22705)
        code = SHOW + "nccl.reset()\n" + SHOW + "print(library.find_nccl().owner)"
        said = in_new_process(code, tmp_path, PYCOMM_NCCL_LIB=mine).splitlines()
        assert said == [f"2.27.5|{mine}|PYCOMM_NCCL_LIB"] * 2 + ["PYCOMM_NCCL_LIB"]

    def test_one_whose_file_is_gone_is_used_still(self, build, tmp_path):
        theirs = build("framework", 21803)
        code = f"ctypes.CDLL({str(theirs)!r})\nos.unlink({str(theirs)!r})\n" + SHOW
        assert in_new_process(code, tmp_path).startswith(f"2.18.3|{theirs}|")

    def test_info_shows_a_conflict(self, build, tmp_path):
        theirs, mine = build("framework", 21803), build("mine", 22705)
        code = f"""
        ctypes.CDLL({str(theirs)!r})
        from pycomm.info import collect, to_text
        print(to_text(collect()))
        """
        said = in_new_process(code, PYCOMM_NCCL_LIB=mine)
        [line] = [line for line in said.splitlines() if line.startswith("NCCL ")]
        assert str(mine) in line
        assert str(theirs) in line

    def test_a_broken_one_is_unloaded_before_the_next_is_tried(self, build, tmp_path):
        source = tmp_path / "broken.c"
        source.write_text("int ncclGetVersion(int *v) { return 3; }")
        broken = tmp_path / "broken/lib/libnccl.so.2"
        broken.parent.mkdir(parents=True)
        abi.compile_c(source, broken, (), "-shared", "-fPIC")
        good = build("good/lib", 22705)
        code = SHOW + "print(library.mapped_paths(library._read_maps(), 'libnccl.so'))"
        said = in_new_process(code, tmp_path / "broken", tmp_path / "good").splitlines()
        assert said == [f"2.27.5|{good}|the nvidia-nccl wheel", f"['{good}']"]

    def test_a_file_that_is_only_read_does_not_count(self):
        maps = (
            "7f00-7f01 r--p 00000000 08:01 77  /data/libnccl.so.2\n"
            "7f01-7f02 r-xp 00000000 08:01 78  /opt/a/libnccl.so.2\n"
            "7f02-7f03 r-xp 00001000 08:01 78  /opt/b/libnccl.so.2.18\n"
            "7f03-7f04 r-xp 00001000 08:01 79  /opt/c/libnccl.so.2 (deleted)\n"
        )
        assert mapped_paths(maps, "libnccl.so") == ["/opt/a/libnccl.so.2", "/opt/c/libnccl.so.2"]


@needs_compiler
class TestDriver:
    def test_a_mapped_one_comes_first(self, tmp_path):
        source, target = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
        source.write_text("int cuDriverGetVersion(int *v) { *v = 12090; return 0; }")
        abi.compile_c(source, target, (), "-shared", "-fPIC")
        code = f"ctypes.CDLL({str(target)!r})\nprint(cuda.library.version, cuda.library.path)"
        assert in_new_process(code) == f"12.9 {target}"

    def test_the_stub_of_the_toolkit_is_no_driver(self, tmp_path):
        source, target = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
        source.write_text("int cuDriverGetVersion(int *v) { return 34; }")
        abi.compile_c(source, target, (), "-shared", "-fPIC")
        said = in_new_process("print(cuda.library)", LD_LIBRARY_PATH=tmp_path)
        assert "cuDriverGetVersion returned 34" in said


def header(**changes):
    """Return the first 64 bytes of a shared library, and one segment; some fields changed."""
    fields = {
        "bits": 2, "order": 1 if sys.byteorder == "little" else 2, "type": 3,
        "machine": _elf._own_machine() or 62, "programs": 64, "sections": 0, "each": 56, "count": 1,
        "length": 120,
    } | changes  # fmt: skip
    mark = "<" if sys.byteorder == "little" else ">"
    head = b"\x7fELF" + bytes([fields["bits"], fields["order"], 1]) + bytes(9)
    head += struct.pack(mark + "HHIQQQ", fields["type"], fields["machine"], 1, 0,
                        fields["programs"], fields["sections"])  # fmt: skip
    head += struct.pack(mark + "IHHHHHH", 0, 64, fields["each"], fields["count"], 64, 0, 0)
    return head + struct.pack(mark + "IIQQQQQQ", 1, 5, 0, 0, 0, fields["length"], 120, 4096)


FAULTY = {
    "empty": (b"", "an empty file"),
    "linker script": (b"/* GNU ld script */\nGROUP ( libnccl.so.2 )\n", "begins with '/* GNU ld s"),
    "page": (b"<!DOCTYPE html>\n<html>", "begins with '<!DOCTYPE html>'"),
    "pointer of LFS": (b"version https://git-lfs.github.com/spec/v1\n", "begins with 'version"),
    "half a header": (header()[:40], "truncated: 40 bytes"),
    "32 bits": (header(bits=1), "32 bits"),
    "byte order": (header(order=1 if sys.byteorder == "big" else 2), "the other byte order"),
    "machine": (header(machine=243 if os.uname().machine != "riscv64" else 62), "a library for "),
    "program": (header(type=2), "no shared library (ELF type 2)"),
    "no segments": (header(count=0), "nothing in it is to be mapped"),
    "half of the segments' table": (header(count=9), "truncated: 120 bytes of at least 568"),
    "half of a segment": (header(length=4096), "truncated: 120 bytes of at least 4096"),
    "segments far away": (header(programs=2**40), "truncated: 120 bytes of at least"),
}


class TestFaults:
    """What would kill the process (SIGBUS), or confuse, never gets to the loader."""

    @pytest.mark.parametrize("case", list(FAULTY))
    def test_are_found_in_the_header(self, case, tmp_path):
        data, words = FAULTY[case]
        file = tmp_path / "libnccl.so.2"
        file.write_bytes(data)
        assert words in find_fault(file)

    def test_a_good_header_has_none(self, tmp_path):
        file = tmp_path / "x.so"
        file.write_bytes(header())
        assert find_fault(file) is None

    def test_what_cannot_be_read_is_one(self, tmp_path):
        assert find_fault(tmp_path / "nowhere") == "No such file or directory"
        assert find_fault(tmp_path) == "Is a directory"

    def test_libraries_that_work_have_none(self):
        seen = set()
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if ".so" in path and path not in seen and Path(path).is_file():
                seen.add(path)
                assert find_fault(path) is None, path
        assert seen

    def test_they_are_refused_by_name_and_the_next_is_tried(self, tmp_path):
        faulty = tmp_path / "lib/libnccl.so.2"
        faulty.parent.mkdir()
        faulty.write_bytes(FAULTY["linker script"][0])
        said = in_new_process(SHOW, tmp_path)
        skip_unless_missing(said)
        assert f"\n  {faulty} (the nvidia-nccl wheel): not a library: no ELF header" in said
        assert "\n  libnccl.so.2 (the system loader): " in said

    @pytest.mark.parametrize("variable", ["PYCOMM_NCCL_LIB", "LD_LIBRARY_PATH"])
    def test_a_truncated_copy_of_the_real_one(self, tmp_path, variable):
        folders = [Path(folder, "lib") for folder in abi.package_folders("nvidia.nccl")]
        real = next((found for folder in folders for found in folder.glob("libnccl.so.2")), None)
        if real is None:
            pytest.skip("no libnccl here")
        copy = tmp_path / "libnccl.so.2"
        with real.open("rb") as source:
            copy.write_bytes(source.read(1 << 20))
        value = copy if variable == "PYCOMM_NCCL_LIB" else tmp_path
        said = in_new_process(SHOW, **{variable: value})
        assert said.startswith("LibraryNotFoundError")
        assert f"{copy}" in said
        assert f"truncated: {1 << 20} bytes of at least {real.stat().st_size}" in said

"""The kernels are compiled for real devices, here where there is none."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pycomm.errors import LibraryNotFoundError
from pycomm.kernels import cuda

pytest.importorskip("cuda.bindings.nvrtc")


SCRIPT = """
import sys
from pathlib import Path
from pycomm.kernels import cuda
if len(sys.argv) > 3:
    cuda.sources = lambda: {"device.cu": sys.argv[3]}
Path(sys.argv[2]).write_bytes(cuda.compile_kernels(sys.argv[1]))
"""


def compiled(tmp_path: Path, architecture: str, *source: str) -> bytes:
    """Return what a process of its own compiles: NVRTC looks at the driver that it finds mapped.

    Where other tests have loaded the double of one, that is not all that NVRTC expects.
    """
    line = [sys.executable, "-c", SCRIPT, architecture, str(tmp_path / "image"), *source]
    done = subprocess.run(line, capture_output=True, text=True, timeout=80)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return (tmp_path / "image").read_bytes()


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90", "sm_100"])
def test_every_kernel_is_compiled(tmp_path: Path, architecture: str) -> None:
    image = compiled(tmp_path, architecture)
    assert image.startswith(b"\x7fELF")
    found = set(re.findall(rb"\.text\.(pycomm_\w+)", image))
    assert found == {name.encode() for name in cuda.NAMES}


def test_newer_devices_get_what_the_driver_compiles(tmp_path: Path) -> None:
    text = compiled(tmp_path, "sm_999")
    assert b".version" in text
    assert b".entry pycomm_reduce_sum_float32" in text


def test_older_devices_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"CommError.*sm_20"):
        compiled(tmp_path, "sm_20")


def test_what_nvrtc_says_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)CommError.*device\.cu"):
        compiled(tmp_path, "sm_80", "this is no C")


def test_images_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[str] = []

    def compile_kernels(architecture: str) -> bytes:
        compiled.append(architecture)
        return b"image"

    monkeypatch.setattr(cuda, "compile_kernels", compile_kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cuda._image("sm_80") == cuda._image("sm_80") == b"image"
    assert cuda._image("sm_90") == b"image"
    assert compiled == ["sm_80", "sm_90"]
    assert len(list((tmp_path / "pycomm").iterdir())) == 2
    monkeypatch.setattr(cuda, "sources", lambda: {"device.cu": "changed"})
    cuda._image("sm_80")
    assert compiled == ["sm_80", "sm_90", "sm_80"]
    # A home that cannot be written to costs time and nothing else.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cuda._image("sm_80") == b"image"


def test_the_extra_is_named_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(LibraryNotFoundError, match=r"pycomm-collectives\[cuda12\]"):
        cuda.compile_kernels("sm_80")

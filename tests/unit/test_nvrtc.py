"""The kernels are compiled for real devices, here where there is none."""

import re
from pathlib import Path

import pytest

from pycomm.errors import CommError, LibraryNotFoundError
from pycomm.kernels import cuda

pytest.importorskip("cuda.bindings.nvrtc")


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90", "sm_100"])
def test_every_kernel_is_compiled(architecture: str) -> None:
    image = cuda.compile_kernels(architecture)
    assert image.startswith(b"\x7fELF")
    found = set(re.findall(rb"\.text\.(pycomm_\w+)", image))
    assert found == {name.encode() for name in cuda.NAMES}


def test_newer_devices_get_what_the_driver_compiles() -> None:
    text = cuda.compile_kernels("sm_999")
    assert b".version" in text
    assert b".entry pycomm_reduce_sum_float32" in text


def test_older_devices_are_refused_by_name() -> None:
    with pytest.raises(CommError, match="sm_20"):
        cuda.compile_kernels("sm_20")


def test_what_nvrtc_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "source_text", lambda: "this is no C")
    with pytest.raises(CommError, match="device.cu"):
        cuda.compile_kernels("sm_80")


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
    monkeypatch.setattr(cuda, "source_text", lambda: "changed")
    cuda._image("sm_80")
    assert compiled == ["sm_80", "sm_90", "sm_80"]
    # A home that cannot be written to costs time and nothing else.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cuda._image("sm_80") == b"image"


def test_the_extra_is_named_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(LibraryNotFoundError, match=r"pycomm-collectives\[cuda12\]"):
        cuda.compile_kernels("sm_80")

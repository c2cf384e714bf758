"""The layout: folders of the repository are packages under one name, and importing is light."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pycomm

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = SETUPTOOLS["package-dir"]


def packages_on_disk():
    """Return the packages that the folders hold, under the names they are installed by."""
    for name, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            yield ".".join((name, *inner))


def test_every_package_on_disk_is_installed():
    assert sorted(packages_on_disk()) == sorted(SETUPTOOLS["packages"])


def test_every_folder_with_modules_is_a_package():
    folders = {file.parent for folder in FOLDERS.values() for file in (ROOT / folder).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def run(code, cwd=ROOT):
    """Run code in a new process and return the lines it prints."""
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


def test_folders_of_the_repository_are_not_imported_by_their_own_names():
    code = "import pycomm, sys; print(*({'topology', 'algorithms', 'bench'} & set(sys.modules)))"
    assert run(code) == [""]


def test_import_loads_no_mpi_no_cuda_no_framework():
    code = """
import pycomm, sys
print(*sorted({"mpi4py.MPI", "torch", "cupy", "jax", "pycomm.bench"} & set(sys.modules)))
maps = open("/proc/self/maps").read()
print(*[name for name in ("libmpi", "libcuda", "libnccl") if name in maps])
"""
    assert run(code) == ["", ""]


def test_a_users_own_topology_and_algorithms_do_not_collide(tmp_path):
    (tmp_path / "topology.py").write_text("mine = 1\n")
    (tmp_path / "algorithms").mkdir()
    (tmp_path / "algorithms" / "__init__.py").write_text("mine = 2\n")
    (tmp_path / "bench.py").write_text("mine = 3\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import algorithms, bench, topology\n"
        "import pycomm, pycomm.bench\n"
        "print(topology.mine, algorithms.mine, bench.mine)\n"
        "print(pycomm.bench is not bench)\n"
    )
    answer = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.split() == ["1", "2", "3", "True"], answer.stderr


def modules():
    """Return the names of all modules, except of those that only have a docstring."""
    for name, folder in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            if len(ast.parse(file.read_text()).body) > 1 and parts[-1] != "__main__":
                yield ".".join((name, *(part for part in parts if part != "__init__")))


def test_every_module_has_all_and_its_names_exist():
    pytest.importorskip("mpi4py", reason="the MPI transport imports it")
    # In a process of its own, where importing the MPI transport does not start MPI.
    code = f"""
import importlib, mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
for name in {list(modules())}:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if not isinstance(names, list) or len(set(names)) < len(names):
        print(name, "has no list of different names as __all__")
    for entry in names or []:
        if not hasattr(module, entry):
            print(name, "has no", entry)
print("done")
"""
    assert run(code) == ["done"]


def test_all_of_pycomm_is_public():
    assert [name for name in pycomm.__all__ if name.startswith("_") and name != "__version__"] == []

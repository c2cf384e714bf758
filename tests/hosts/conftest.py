"""Hosts that `scripts/hosts` makes on this machine; tests are skipped where it cannot."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts.harness import Hosts, Tool

from pycomm import LibraryNotFoundError, launch

# By the process that made them, so that those of tests that were killed can be found.
FOLDERS = "/run/pycomm-hosts-tests-"


@pytest.fixture(scope="session")
def mpirun() -> str:
    """The folder of Open MPI's mpirun."""
    try:
        found = launch.probe()
        path = launch.find_mpirun(found).path
    except LibraryNotFoundError as error:
        pytest.skip(f"needs Open MPI: {str(error).splitlines()[0]}")
    if found.vendor != "Open MPI" or found.version < (5,):
        pytest.skip(f"needs Open MPI 5; this is {found.vendor}")
    return str(Path(path).parent)


def tool(kind: str, *first: str) -> Tool:
    path = os.pathsep.join([*first, os.environ.get("PATH", os.defpath)])
    return Tool(Path(f"{FOLDERS}{os.getpid()}-{kind}"), path)


@pytest.fixture(scope="session")
def allowed() -> None:
    """Skip where no hosts can be made; end hosts of tests that were killed."""
    code, text = tool("check").ask("check")
    if code != 0:
        pytest.skip(f"cannot make hosts here: {text.strip()}")
    for folder in Path(FOLDERS).parent.glob(f"{Path(FOLDERS).name}*"):
        owner = folder.name.removeprefix(Path(FOLDERS).name).partition("-")[0]
        if not Path("/proc", owner).exists():
            Tool(folder, os.environ["PATH"]).do("down")


@pytest.fixture
def fresh(allowed: None) -> Iterator[Tool]:
    """A tool without hosts, for tests that make their own."""
    one = tool("fresh")
    yield one
    one.do("down")


@pytest.fixture(scope="session", params=[2, 3], ids="{} hosts".format)
def hosts(request: pytest.FixtureRequest, allowed: None, mpirun: str) -> Iterator[Hosts]:
    """So many hosts, made once for all tests that use them."""
    made = Hosts(request.param, tool(f"{request.param}", mpirun))
    made.tool.do("up", made.count)
    yield made
    made.tool.do("down")
    assert not made.tool.left()

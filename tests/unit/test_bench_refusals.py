"""What the benchmark refuses, before anything is measured."""

import importlib.util
import types

import pytest
from support.benchmark import SIZES, bench, table

from pycomm.bench import measure, peers


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["broadcast", "-r", "2"], "-r 2: the ranks are 0 to 1"),
        (["all_reduce", "--algorithm", "magic"], "unknown algorithm 'magic'"),
        (["all_reduce", "--json", "/nowhere/x.json"], "/nowhere/x.json cannot be written"),
        (["all_reduce", "--csv", "/nowhere/x.csv"], "/nowhere/x.csv cannot be written"),
        (["all_reduce", "--plot", "/nowhere/x.png"], "/nowhere/x.png cannot be written"),
        (["all_reduce", "--plot", "x.bmp"], "the name must end in .png"),
        (["all_reduce", "--compare", "mpi4py"], "start the job with mpirun"),
    ],
)
def test_what_cannot_be_run_is_said_once_and_ends_all_ranks(capsys, argv, says):
    if "mpi4py" in argv:
        pytest.importorskip("mpi4py")
    codes, text = bench(2, *argv, *SIZES)
    assert codes == [2, 2]
    assert capsys.readouterr().err.count(says) == 1
    assert table(text) == []


def test_a_least_bandwidth_that_is_no_number_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", "fast")
    assert bench(2, "all_reduce", *SIZES)[0] == [2, 2]
    assert "NCCL_TESTS_MIN_BW=fast is not a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "argv", "says"),
    [
        ("matplotlib", ["--plot", "x.png"], "pip install 'pycomm-collectives[bench]'"),
        ("mpi4py", ["--compare", "mpi4py"], "pip install 'pycomm-collectives[mpi]'"),
        ("torch", ["--compare", "gloo"], "pip install torch"),
    ],
)
def test_missing_libraries_are_named_before_anything_is_measured(
    monkeypatch, capsys, missing, argv, says
):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else found(name)
    )
    codes, text = bench(2, "all_reduce", *SIZES, *argv)
    assert codes == [2, 2]
    assert says in capsys.readouterr().err
    assert text == ""


def test_a_refused_run_leaves_no_files(tmp_path):
    names = [tmp_path / name for name in ("run.json", "run.csv")]
    flags = ["--json", str(names[0]), "--csv", str(names[1])]
    assert bench(2, "broadcast", "-r", "5", *flags, *SIZES)[0] == [2, 2]
    assert list(tmp_path.iterdir()) == []


def test_files_are_left_as_they_are_when_another_cannot_be_written(tmp_path):
    new, old = tmp_path / "new.csv", tmp_path / "old.png"
    old.write_text("an older picture")
    flags = ["--csv", str(new), "--plot", str(old), "--json", "/nowhere/x.json"]
    assert bench(2, "all_reduce", *flags, *SIZES)[0] == [2, 2]
    assert not new.exists()
    assert old.read_text() == "an older picture"


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 1)])
def test_mpi4py_must_have_the_same_ranks(rank, size):
    pytest.importorskip("mpi4py")
    comm = types.SimpleNamespace(rank=rank, size=size)
    assert f"{rank} of {size} in pycomm" in peers.why_not("mpi4py", comm)
    assert peers.why_not("mpi4py", types.SimpleNamespace(rank=0, size=1)) is None


def test_a_peer_that_cannot_be_opened_is_refused(monkeypatch, capsys):
    def broken(name, comm):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(peers, "open_peer", broken)
    monkeypatch.setattr(peers, "why_not", lambda name, comm: None)
    assert bench(2, "all_reduce", *SIZES, "--compare", "gloo")[0] == [2, 2]
    assert "--compare: no route to host" in capsys.readouterr().err


def test_no_memory_on_one_rank_ends_all(monkeypatch, capsys):
    def allocate(nbytes, comm=None):
        raise MemoryError

    monkeypatch.setattr(measure.Memory, "allocate", allocate)
    assert bench(2, "all_reduce", *SIZES)[0] == [2, 2]
    assert "no memory for two buffers of 4096 bytes" in capsys.readouterr().err

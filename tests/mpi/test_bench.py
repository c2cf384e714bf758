"""The benchmark under mpirun: the same code on every rank, all of them in one job."""

import json

import numpy as np
import pytest

import pycomm
from pycomm.bench import cli, correctness, peers
from pycomm.bench.cases import CASES, place
from pycomm.dtypes import DTYPES

SIZES = ["-b", "64", "-e", "4K", "-f", "8", "-n", "3"]


@pytest.fixture
def comm():
    with pycomm.init() as world:
        yield world


def table(text):
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.mpi
@pytest.mark.parametrize("name", CASES)
def test_every_collective_is_right_and_compared(name, capsys, comm):
    root = comm.size - 1
    assert cli.main([name, *SIZES, "-r", str(root), "--compare", "mpi4py"]) == 0
    shown = capsys.readouterr()
    if comm.rank != 0:
        assert shown.out == ""
        return
    case = CASES[name]
    rows = table(shown.out)
    assert len(rows) == (3 if case.moves else 1)
    for cells in rows:
        assert len(cells) == 17
        assert cells[8] == ("0" if case.moves else "N/A")
        assert cells[12] == ("0" if case.in_place else "N/A")
        # MPI has no broadcast out of place.
        assert (cells[13] == "N/A") == (name == "broadcast")
        assert (cells[15] == "N/A") == (not case.in_place)
    assert "# mpi4py / pycomm" in shown.out


@pytest.mark.mpi
@pytest.mark.parametrize("flags", [[], ["--error-feedback"]])
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather"])
def test_every_compression_is_right_and_compared(name, flags, capsys, comm):
    names = ["none", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"]
    peer = ["--compare", "mpi4py"]
    assert (
        cli.main([name, *SIZES, *peer, "--verify", "--compression", ",".join(names), *flags]) == 0
    )
    if comm.rank != 0:
        return
    text = capsys.readouterr().out
    rows = table(text)
    assert [cells[-4] for cells in rows] == names * 3
    assert {cells[8] for cells in rows} == {cells[12] for cells in rows} == {"0"}
    assert all(float(cells[14]) > 0 for cells in rows)
    for cells in rows:
        # Plain rows may be of MPI's own collective, whose bytes are not known.
        assert cells[-3] == cells[-7]
        assert cells[-4] == "none" or int(cells[-3]) < comm.size * max(1, int(cells[0])) * 2
    assert "# Bytes unlike schedule : 0 OK" in text


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_every_type_and_operation(name, capsys, comm):
    flags = ["-b", "1000", "-e", "1000", "-n", "1", "-w", "0", "-d", "all", "-o", "all"]
    assert cli.main([name, *flags]) == 0
    if comm.rank == 0:
        assert len(table(capsys.readouterr().out)) == 60


@pytest.mark.mpi
def test_what_mpi_lacks_is_not_available(capsys, comm):
    for dtype, op in (("bfloat16", "sum"), ("float", "avg"), ("float", "mulsum")):
        assert cli.main(["all_reduce", *SIZES, "-d", dtype, "-o", op, "--compare", "mpi4py"]) == 0
        if comm.rank == 0:
            assert table(capsys.readouterr().out)[0][13:] == ["N/A"] * 4


def what_a_peer_lacks(peer, name, dtype, comm):
    """Check every call that the peer has; return the sides that it does not have."""
    case, row = CASES[name], DTYPES[dtype]
    op = "sum" if case.reduces else None
    root = comm.size - 1
    counts = case.counts(4096, row.itemsize, comm.size)
    buffers = np.zeros((2, 4096), np.uint8).view(row.numpy)
    lacking = []
    for in_place in (False, True) if case.in_place else (False,):
        placed = place(case, comm.rank, root, counts, *buffers, in_place=in_place)
        call = peer.bind(case, placed, op=op, root=root, in_place=in_place)
        if call is None:
            lacking.append("in place" if in_place else "out of place")
            continue
        pattern = correctness.Pattern(row, op, comm.size)
        result = placed.result
        if result is not None:
            expected = correctness.expected_result(case, pattern, comm.rank, root, counts)
            correctness.poison(result, expected)
        if placed.source is not None:
            placed.source[...] = pattern.input(comm.rank, 0, placed.source.size)
        call()
        if result is not None:
            if (peer.name, name, in_place) == ("mpi4py", "reduce_scatter", True):
                result = placed.x[: result.size]  # where MPI leaves it
            assert correctness.wrong_elements(result, expected, op) == 0, (name, dtype, in_place)
    return lacking


MOVING = [name for name, case in CASES.items() if case.moves]


@pytest.mark.mpi
@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("dtype", ["int32", "float64", "bfloat16"])
def test_mpi4py_does_what_pycomm_does(name, dtype, comm):
    """A ratio means something only if both sides end with the same data."""
    lacking = what_a_peer_lacks(peers.open_peer("mpi4py", comm), name, dtype, comm)
    if CASES[name].reduces and dtype == "bfloat16":
        assert lacking == ["out of place", "in place"]
    else:
        assert lacking == (["out of place"] if name == "broadcast" else [])


@pytest.mark.mpi
def test_gloo_does_what_pycomm_does(comm):
    pytest.importorskip("torch")
    peer = peers.open_peer("gloo", comm)
    try:
        for name in MOVING:
            if name == "send_recv" and comm.size == 1:
                continue  # gloo sends nothing to itself
            for dtype in ("int32", "float64", "bfloat16"):
                lacking = what_a_peer_lacks(peer, name, dtype, comm)
                only_in_place = name in ("all_reduce", "reduce", "broadcast")
                only_apart = name == "all_to_all"
                assert lacking == (
                    ["out of place"] if only_in_place else ["in place"] if only_apart else []
                )
    finally:
        peer.close()


@pytest.mark.mpi
def test_json_of_all_ranks(tmp_path, comm):
    path = tmp_path / "run.json"
    flags = ["--json", str(path), "--compare", "mpi4py", "-I", "1", "-a", "3"]
    assert cli.main(["all_gather", *SIZES, *flags]) == 0
    if comm.rank != 0:
        assert not path.exists()
        return
    found = json.loads(path.read_text())
    assert [device["rank"] for device in found["config"]["devices"]] == list(range(comm.size))
    assert len({device["pid"] for device in found["config"]["devices"]}) == comm.size
    assert found["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert found["pycomm"]["ranks"] == comm.size
    assert found["pycomm"]["peers"][0]["name"] == "mpi4py"
    for row in found["results"]:
        side = row["out_of_place"]
        assert side["time"] > 0
        assert len(side["rank_times"]) == comm.size
        assert len(row["out_of_place_per_iter"]["times_us"]) == 3
        assert (side["bus_bw"] > 0) == (comm.size > 1 and row["size"] > 0)
        assert row["peers"][0]["in_place"]["ratio"] > 0


@pytest.mark.mpi
@pytest.mark.parametrize(
    "argv",
    [
        ["all_reduce", "-f", "1"],
        ["broadcast", "-r", "1000"],
        ["all_reduce", "--json", "/nowhere/x.json"],
        ["all_reduce", "--algorithm", "magic"],
    ],
)
def test_all_ranks_refuse_together_and_rank_0_says_why(argv, capsys, comm):
    assert cli.main([*argv, "-b", "8", "-e", "8"]) == 2
    shown = capsys.readouterr()
    assert ("error: " in shown.err) == (comm.rank == 0)


@pytest.mark.mpi
def test_too_little_bandwidth_fails_on_all_ranks(monkeypatch, comm):
    if comm.rank == 0:
        # Rank 0 decides, whatever the other ranks would think.
        monkeypatch.setenv("NCCL_TESTS_MIN_BW", "1e9")
    assert cli.main(["all_reduce", "-b", "8", "-e", "8"]) == 1

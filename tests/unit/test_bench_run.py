import json

import numpy as np
import pytest
from support.benchmark import SIZES, bench, table, ticking

import pycomm
from pycomm.bench import measure, peers
from pycomm.bench.cases import CASES


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_every_collective_runs_and_is_right(name, ranks):
    codes, text = bench(ranks, name, *SIZES, "-r", str(ranks - 1))
    assert codes == [0] * ranks
    rows = table(text)
    case = CASES[name]
    assert len(rows) == (3 if case.moves else 1)
    for cells in rows:
        assert len(cells) == 13
        assert cells[3] == ("sum" if case.reduces else "none")
        assert cells[4] == (str(ranks - 1) if case.rooted else "-1")
        assert cells[8] == ("0" if case.moves else "N/A")
        assert cells[12] == ("0" if case.in_place else "N/A")
        assert cells[5] == "1000.00" or case.name == "barrier"
    assert "# Out of bounds values : 0 OK" in text
    assert ("# one rank: nothing crosses a link" in text) == (ranks == 1)


def test_columns_by_hand():
    # The clock moves by 1 ms a reading, so a block of 4 iterations takes 1 ms: 250 us each.
    _, text = bench(2, "all_gather", "-b", "1M", "-e", "1M", "-d", "double")
    assert table(text) == [
        ["1048576", "65536", "double", "none", "-1", *(["250.00", "4.19", "2.10", "0"] * 2)]
    ]
    assert "# Avg bus bandwidth    : 2.09715" in text


@pytest.mark.parametrize("dtype", ["all", "complex64", "bool", "int16"])
def test_every_type_and_operation_is_checked(dtype):
    op = "sum" if dtype in ("complex64", "bool") else "all"
    codes, text = bench(
        3, "all_reduce", "-b", "1000", "-e", "1000", "-n", "1", "-d", dtype, "-o", op, "-c", "2"
    )
    assert codes == [0, 0, 0]
    assert len(table(text)) == {"all": 60, "int16": 6}.get(dtype, 1)


def test_every_root_and_type_is_moved():
    codes, text = bench(2, "scatter", "-b", "256", "-e", "256", "-d", "all", "-r", "all")
    assert codes == [0, 0]
    assert [cells[4] for cells in table(text)] == ["0", "1"] * 12


class Faulty:
    """A communicator that flips one bit of one element of a result on one rank."""

    def __init__(self, comm, method, rank, calls):
        self._comm = comm
        self._method = method
        self._rank = rank
        self._calls = calls

    def __getattr__(self, name):
        found = getattr(self._comm, name)
        if name != self._method:
            return found

        def call(*args, **options):
            result = found(*args, **options)
            if self._comm.rank == self._rank and self._calls:
                self._calls.pop()
                result.reshape(-1)[-1:].view(np.uint8)[-1] ^= 0x40
            return result

        return call


@pytest.mark.parametrize(
    ("name", "calls", "out_of_place", "in_place"),
    [("all_reduce", 1, "1", "0"), ("all_gather", 2, "1", "1"), ("all_to_all", 1, "1", "0")],
)
def test_a_wrong_element_is_counted_and_fails_the_run(name, calls, out_of_place, in_place):
    left = [None] * calls
    codes, text = bench(
        2, name, "-b", "4K", "-e", "4K", wrap=lambda comm: Faulty(comm, name, 1, left)
    )
    cells = table(text)[0]
    assert (cells[8], cells[12]) == (out_of_place, in_place)
    assert f"# Out of bounds values : {calls} FAILED" in text
    assert codes == [1, 1]


def test_a_call_that_writes_nothing_makes_every_element_wrong():
    class Lazy(Faulty):
        def __getattr__(self, name):
            return (lambda *a, **k: None) if name == "all_gather" else super().__getattr__(name)

    codes, text = bench(
        2, "all_gather", "-b", "4K", "-e", "4K", wrap=lambda comm: Lazy(comm, "", 0, [])
    )
    # In place each rank's own half is already there.
    assert [table(text)[0][index] for index in (8, 12)] == ["2048", "1024"]
    assert codes == [1, 1]


def test_nothing_is_checked_with_c_0():
    left = [None]
    codes, text = bench(
        2, "all_reduce", *SIZES, "-c", "0", wrap=lambda comm: Faulty(comm, "all_reduce", 0, left)
    )
    assert codes == [0, 0]
    assert {cells[8] for cells in table(text)} == {"N/A"}


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("step", [0.0, 1e-3])
def test_no_infinity_and_no_nan_even_when_no_time_passes(tmp_path, ranks, step):
    path = tmp_path / "run.json"
    codes, text = bench(
        ranks, "all_reduce", *SIZES, "-I", "1", "--json", str(path), clock=lambda: ticking(step)
    )
    assert codes == [0] * ranks
    cells = {cell for line in table(text) for cell in line}
    assert cells.isdisjoint({"inf", "-inf", "nan"})
    found = json.loads(path.read_text())
    assert np.isfinite(numbers(found)).all()
    busbw = [row["out_of_place"]["bus_bw"] for row in found["results"]]
    assert all(value > 0 for value in busbw) == (ranks == 2 and step > 0)


@pytest.mark.parametrize(("least", "code"), [("4.6", 0), ("4.7", 1), ("", 0)])
def test_the_least_bandwidth_decides_the_exit_code(monkeypatch, least, code):
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", least)
    # 1 MiB in 250 us are 4.194 GB/s; 0.9 of what is asked for is enough.
    codes, _ = bench(2, "all_reduce", "-b", "1M", "-e", "1M")
    assert codes == [code, code]


def test_files_of_a_whole_run(tmp_path):
    names = {kind: tmp_path / f"run.{kind}" for kind in ("json", "csv", "png")}
    names["csv"].write_text("an older run\n")
    flags = ["--json", names["json"], "--csv", names["csv"], "--plot", names["png"]]
    codes, text = bench(2, "all_reduce", *SIZES, *map(str, flags), "--algorithm", "auto,direct")
    assert codes == [0, 0]
    assert f"# Writing JSON output to {names['json']}" in text
    found = json.loads(names["json"].read_text())
    assert [row["algorithm"] for row in found["results"]] == ["auto", "direct"] * 3
    assert [cells[13] for cells in table(text)] == ["auto", "direct"] * 3
    assert found["pycomm"]["ranks"] == 2
    assert found["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert found["average_bus_bandwidth"]["okay"] == "unchecked"
    assert len(found["results"][0]["out_of_place"]["rank_times"]) == 2
    assert len(names["csv"].read_text().splitlines()) == 1 + 3 * 2 * 2
    assert names["png"].read_bytes().startswith(b"\x89PNG")


def test_bytes_on_the_wire_are_those_of_the_schedule(tmp_path):
    file = tmp_path / "run.json"
    for collective, name, factor in (
        ("all_reduce", "ring", 2 * 2),  # 2(n-1)/n D from each of n ranks
        ("all_reduce", "one_shot", 3 * 2),
        ("broadcast", "binomial", 2),
        ("all_gather", "bruck", 2),
    ):
        codes, text = bench(
            3, collective, "-b", "3K", "-e", "3K", "--verify", "--algorithm", name, "-J", str(file)
        )
        assert codes == [0, 0, 0]
        (row,) = json.loads(file.read_text())["results"]
        file.unlink()
        expected = factor * row["size"]
        assert row["wire"] == {"ran": name, "sent": expected, "scheduled": expected}
        assert table(text)[0][-3:] == [str(expected), str(expected), name]
        assert "# Bytes unlike schedule : 0 OK" in text


def test_buffers_in_registered_memory():
    codes, text = bench(2, "all_reduce", *SIZES, "--registered")
    assert codes == [0, 0]
    assert "# Registered memory" in text
    assert {cells[8] for cells in table(text)} == {"0"}


def test_a_lost_message_shows_in_the_bytes():
    class Counting(Faulty):
        """A communicator that counts four bytes too many each time."""

        extra = 0

        def __getattr__(self, name):
            return getattr(self._comm, name)

        @property
        def bytes_sent(self):
            self.extra += 4
            return self._comm.bytes_sent + self.extra

    codes, text = bench(
        2, "all_reduce", "-b", "4K", "-e", "4K", "--verify",
        wrap=lambda comm: Counting(comm, "all_reduce", 0, None),
    )  # fmt: skip
    assert codes == [1, 1]
    assert "# Bytes unlike schedule : 1 FAILED" in text


def test_a_failure_keeps_what_was_measured(tmp_path):
    class Breaking(Faulty):
        def __getattr__(self, name):
            return getattr(self._comm, name)

        def barrier(self):
            self._calls.append(None)
            if len(self._calls) > 6:
                raise pycomm.CommError("the wire is cut")
            self._comm.barrier()

    path = tmp_path / "run.json"
    with pytest.raises(pycomm.CommError, match="the wire is cut"):
        bench(
            1, "all_reduce", *SIZES, "--json", str(path),
            wrap=lambda comm: Breaking(comm, "barrier", 0, []),
        )  # fmt: skip
    found = json.loads(path.read_text())
    assert found["errors"] == ["the wire is cut"]
    # A barrier before each block: two blocks of two sides a row.
    assert len(found["results"]) == 1


def test_osu_columns_of_a_run():
    codes, text = bench(2, "all_gather", *SIZES, "--format", "osu", "-d", "int8")
    assert codes == [0, 0]
    assert text.splitlines()[1] == "# Datatype: int8."
    assert table(text) == [
        ["32", "1000.00", "Pass"],
        ["256", "1000.00", "Pass"],
        ["2048", "1000.00", "Pass"],
    ]


@pytest.mark.parametrize("blocking", ["0", "1", "2", "3"])
@pytest.mark.parametrize("name", ["all_reduce", "all_to_all", "barrier"])
def test_aggregated_and_blocking_calls(name, blocking):
    codes, text = bench(2, name, *SIZES, "-m", "3", "-z", blocking)
    assert codes == [0, 0]
    # One reading of the clock a block of one iteration, of three calls.
    assert table(text)[0][5] == "333.33"


def test_warm_up_iterations_are_made():
    counted = []

    class Counting(Faulty):
        def __getattr__(self, name):
            if name != "all_reduce":
                return getattr(self._comm, name)
            return lambda *a, **k: (counted.append(1), self._comm.all_reduce(*a, **k))

    wrap = lambda comm: Counting(comm, "", 0, [])  # noqa: E731
    bench(1, "all_reduce", "-b", "8", "-e", "8", "-w", "50", "-n", "6", "-c", "2", wrap=wrap)
    # Two sides, each: two checks, the warm-up, the timed iterations.
    assert len(counted) == 2 * (2 + 50 + 6)


class Slow:
    """A peer that has no in-place call and is slow."""

    name = "slow"
    version = "1"

    def __init__(self, comm):
        self.calls = []
        self.closed = False

    def bind(self, case, placement, *, op, root, in_place):
        return None if in_place else lambda: self.calls.append(case.name)

    def close(self):
        self.closed = True


def test_peers_are_measured_in_the_same_run(monkeypatch):
    made = []

    def open_peer(name, comm):
        made.append(Slow(comm))
        return made[-1]

    monkeypatch.setattr(peers, "open_peer", open_peer)
    monkeypatch.setattr(peers, "why_not", lambda name, comm: None)
    codes, text = bench(
        2, "all_reduce", "-b", "64", "-e", "64", "-n", "10", "--compare", "gloo",
        clock=lambda: ticking(0.5),
    )  # fmt: skip
    assert codes == [0, 0]
    # pycomm: half a second for a block of 2; the peer: for a block of 1, as it is slow.
    assert table(text)[0][13:] == ["500000", "2.00", "N/A", "N/A"]
    assert "(geometric mean of 1 times)" in text
    # Two calls to try, a warm-up, five blocks.
    assert [len(peer.calls) for peer in made] == [8, 8]
    assert all(peer.closed for peer in made)


def test_a_peer_that_refuses_on_any_rank_is_left_out(monkeypatch):
    class Refusing(Slow):
        def bind(self, case, placement, *, op, root, in_place):
            if self.rank == 1:
                return self.refuse
            return lambda: None

        def refuse(self):
            raise NotImplementedError

        def __init__(self, comm):
            super().__init__(comm)
            self.rank = comm.rank

    monkeypatch.setattr(peers, "open_peer", lambda name, comm: Refusing(comm))
    monkeypatch.setattr(peers, "why_not", lambda name, comm: None)
    codes, text = bench(2, "all_reduce", *SIZES, "--compare", "gloo")
    assert codes == [0, 0]
    assert table(text)[0][13:] == ["N/A"] * 4


def test_memory_is_aligned_and_typed():
    memory = measure.Memory.allocate(1001)
    assert memory.send.ctypes.data % 64 == memory.recv.ctypes.data % 64 == 0
    send, recv = memory.typed(np.dtype(np.float64))
    assert send.size == recv.size == 125
    assert not np.shares_memory(send, recv)


class Recording(Faulty):
    """A communicator that passes the arguments of one method to `calls`, a function."""

    def __getattr__(self, name):
        found = getattr(self._comm, name)
        if name != self._method:
            return found
        return lambda *args, **options: self._calls(found, *args, **options)


def test_an_output_left_from_the_call_before_is_not_taken_for_a_result():
    def only_auto(method, x, out=None, *, algorithm, **options):
        if algorithm == "auto":
            method(x, out, algorithm=algorithm, **options)

    codes, text = bench(
        2, "all_gather", "-b", "4K", "-e", "4K", "--algorithm", "auto,direct",
        wrap=lambda comm: Recording(comm, "all_gather", 0, only_auto),
    )  # fmt: skip
    assert [cells[8] for cells in table(text)] == ["0", "2048"]
    assert codes == [1, 1]


@pytest.mark.parametrize(("op", "neutral"), [("sum", 0), ("prod", 1), ("mulsum", 0)])
def test_timed_reductions_change_nothing(op, neutral):
    seen = []

    def record(method, x, out=None, **options):
        seen.append(set(x.tolist()))
        return method(x, out, **options)

    bench(
        1, "all_reduce", "-b", "64", "-e", "64", "-n", "5", "-o", op,
        wrap=lambda comm: Recording(comm, "all_reduce", 0, record),
    )  # fmt: skip
    checked, timed = seen[:2], seen[2:]
    assert len(timed) == 12
    assert all(values == {neutral} for values in timed)
    assert all(len(values) > 1 for values in checked)


@pytest.mark.parametrize(
    ("blocking", "barriers", "time"),
    # Ten blocks of two iterations; the clock is read twice for each, or for each iteration.
    [("0", 10, "500.00"), ("1", 30, "500.00"), ("2", 10, "500.00"), ("3", 30, "1000.00")],
)
def test_barriers_of_blocking_runs(blocking, barriers, time):
    counted = []

    def record(method):
        counted.append(1)
        method()

    _, text = bench(
        1, "all_reduce", "-b", "64", "-e", "64", "-n", "10", "-w", "0", "-z", blocking,
        wrap=lambda comm: Recording(comm, "barrier", 0, record),
    )  # fmt: skip
    assert len(counted) == barriers
    assert table(text)[0][5] == time

"""Compression: rows, bytes and errors, what the formats allow, and what is refused."""

import csv
import io
import json
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from support.benchmark import SIZES, bench, table, ticking

import pycomm
from pycomm.algorithms.compression import ErrorFeedback
from pycomm.bench import compression, files, plot, report
from pycomm.bench.cases import CASES, place
from pycomm.bench.compression import NAMES, Trial, Variant
from pycomm.bench.options import Stop, parse
from pycomm.bench.results import Compression, Row, make_side
from pycomm.bench.sweep import run

ENCODED = NAMES[1:]
COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather"]
TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
ONE = ["-b", "3K", "-e", "3K", "-n", "1"]


def refused(*argv):
    with pytest.raises(Stop) as caught:
        parse(argv)
    assert caught.value.code == 2
    return caught.value.text


def trial(name, op="sum", *, part=100, rank=0, size=2, repeat=0):
    case = CASES[name]
    parts = size if case.send_parts or case.recv_parts else 1
    counts = case.counts(4 * part * parts, 4, size)
    return Trial(case, op if case.reduces else None, counts, rank, size, repeat)


def exact(one):
    """Return the exact result, and the magnitudes of what is added up, each in one piece."""
    size = one.counts.param * (one.size if one.case.recv_parts else 1)
    found, magnitudes = np.full((2, size), np.nan)
    for where, values, magnitude in one.expected():
        found[where], magnitudes[where] = values, magnitude
    return found, magnitudes


def test_what_is_asked_for():
    options = parse(["all_reduce"])
    assert (options.compressions, options.error_feedback, options.compressed) == (
        ("none",), False, False,
    )  # fmt: skip
    for name in COLLECTIVES:
        options = parse([name, "--compression", ",".join(NAMES), "--error-feedback"])
        assert options.compressions == NAMES
        assert options.error_feedback
        assert options.compressed
    # Without compression nothing has to fit.
    for argv in (["broadcast"], ["all_reduce", "-d", "all", "-o", "max"], ["barrier"]):
        assert not parse([*argv, "--compression", "none", "--format", "osu"]).compressed


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["broadcast"], "it is for all_reduce, reduce_scatter, all_gather, not for broadcast"),
        (["barrier"], "it is for all_reduce, reduce_scatter, all_gather, not for barrier"),
        (["all_reduce", "-d", "half"], "it is for type float only"),
        (["all_gather", "-d", "all"], "it is for type float only"),
        (["all_reduce", "-o", "max"], "it is for op sum and avg only"),
        (["reduce_scatter", "-o", "all"], "it is for op sum and avg only"),
        (["all_reduce", "-o", "mulsum"], "it is for op sum and avg only"),
        (["all_reduce", "--format", "osu"], "the osu columns have no place for it"),
    ],
)
def test_refusals_say_why(argv, says):
    assert f"argument --compression: {says}" in refused(*argv, "--compression", "none,bf16")


def test_names_and_error_feedback_that_are_refused():
    assert "'zip' is unknown; known: none, bf16, fp16" in refused(
        "all_reduce", "--compression", "bf16,zip"
    )
    for argv in ([], ["--compression", "none"]):
        assert "nothing is rounded; name a --compression" in refused(
            "all_reduce", "--error-feedback", *argv
        )


def combinations(algorithms, names, *, ranks=2, feedback=False, count=8):
    case = CASES["all_reduce"]

    def one(comm):
        send, recv = np.zeros((2, count), np.float32)
        placed = place(
            case, comm.rank, -1, case.counts(4 * count, 4, ranks), send, recv, in_place=False
        )
        return compression.variants(
            case, comm, placed, algorithms, names, feedback=feedback, op="sum", root=-1
        )

    return pycomm.run_local(ranks, one)


def test_every_combination_that_works_has_a_row():
    for found in combinations(("auto", "ring", "direct"), ("none", "bf16")):
        assert [(one.algorithm, one.name) for one in found] == [
            ("auto", "none"), ("auto", "bf16"), ("ring", "none"),
            ("direct", "none"), ("direct", "bf16"),
        ]  # fmt: skip
        assert all(one.feedback is None for one in found)
    # One rank has nothing to encode, and every algorithm is able to do that.
    assert len(combinations(("ring",), ("none", "bf16"), ranks=1)[0]) == 2


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [("ring", "has no seat for a codec"), ("magic,direct", "unknown algorithm 'magic'")],
)
def test_combinations_of_which_none_works_are_refused(algorithm, says, capsys):
    codes, text = bench(2, "all_reduce", *ONE, "--compression", "bf16", "--algorithm", algorithm)
    assert codes == [2, 2]
    assert table(text) == []
    assert capsys.readouterr().err.count(says) == 1


def test_each_row_feeds_back_with_a_key_for_each_side():
    rows = combinations(("auto", "direct"), ("none", "bf16", "fp16"), feedback=True)
    codecs = [one.feedback for found in rows for one in found if one.name != "none"]
    assert len(codecs) == len(set(map(id, codecs))) == 2 * 4
    assert all(one.feedback is None for found in rows for one in found if one.name == "none")
    one = Variant("direct", "bf16", ErrorFeedback("bf16"))
    sides = [one.arguments(in_place) for in_place in (False, True)]
    assert [side["key"] for side in sides] == ["out_of_place", "in_place"]
    assert all(side["compression"] is one.feedback for side in sides)
    assert Variant(None, "bf16").arguments(False) == {"algorithm": None, "compression": "bf16"}
    assert Variant("ring").arguments(True) == {"algorithm": "ring"}


def test_values_are_the_same_however_they_are_cut(monkeypatch):
    monkeypatch.setattr(compression, "_PIECE", 8)
    one = trial("all_reduce")
    whole = one.values(1, 0, 50)
    assert whole.dtype == np.float32
    for start, stop in ((0, 8), (3, 5), (7, 9), (8, 16), (5, 50), (20, 20)):
        np.testing.assert_array_equal(one.values(1, start, stop), whole[start:stop])


def test_values_are_normal_and_differ_between_ranks_trials_and_pieces():
    one, other = trial("all_reduce"), trial("all_reduce", repeat=1)
    piece = compression._PIECE
    drawn = [
        one.values(0, 0, piece), one.values(1, 0, piece), other.values(0, 0, piece),
        one.values(0, piece, 2 * piece),
    ]  # fmt: skip
    for values in drawn:
        assert abs(values.mean()) < 0.05
        assert abs(values.std() - 1) < 0.05
        assert np.abs(values).max() < 7
    for index, values in enumerate(drawn):
        assert all(not np.isin(values, later).all() for later in drawn[index + 1 :])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_is_expected_is_what_numpy_says(name, op, size, monkeypatch):
    monkeypatch.setattr(compression, "_PIECE", 32)
    for rank in range(size):
        one = trial(name, op, rank=rank, size=size)
        part, send = one.counts.param, one.counts.send
        assert part == 100
        inputs = np.array([one.values(peer, 0, send) for peer in range(size)], np.float64)
        divisor = size if op == "avg" else 1
        if name == "all_gather":
            wanted, magnitudes = inputs.reshape(-1), np.abs(inputs).reshape(-1)
        else:
            own = slice(rank * part, (rank + 1) * part) if name == "reduce_scatter" else slice(None)
            wanted = inputs.sum(0)[own] / divisor
            magnitudes = np.abs(inputs).sum(0)[own] / divisor
        found = exact(one)
        np.testing.assert_array_equal(found[0], wanted)
        np.testing.assert_array_equal(found[1], magnitudes)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_inputs_are_written_and_results_are_no_numbers_before_a_call(name, in_place):
    one = trial(name, rank=1, size=3)
    send, recv = np.zeros((2, 300), np.float32)
    placed = place(one.case, 1, -1, one.counts, send, recv, in_place=in_place)
    one.prepare(placed)
    np.testing.assert_array_equal(placed.source, one.values(1, 0, one.counts.send))
    if not in_place:
        assert np.isnan(placed.result).all()
    elif name == "all_gather":
        assert np.isnan(placed.result).sum() == 200  # its own part is its input


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("encoding", ENCODED)
def test_one_rounding_is_allowed_and_a_coarser_format_is_not(encoding, name, op):
    one = trial(name, op, size=3, part=2000)
    wanted, magnitudes = exact(one)
    rounded = wanted.astype(TYPES[encoding]).astype(np.float32)
    assert one.wrong(rounded, encoding) == 0
    half = compression._HALF_STEPS[encoding]
    # The half step is the one that the type has.
    assert half == float(ml_dtypes.finfo(TYPES[encoding]).eps) / 2
    # Two half steps, and what is let pass near 0, are all that is allowed.
    far = 3 * half * (magnitudes + one.size * 2 / 64)
    assert one.wrong(wanted + far, encoding) == one.wrong(wanted - far, encoding) == wanted.size
    coarse = {"fp16": "bf16", "bf16": "fp8_e4m3"}.get(encoding)
    if coarse is not None and name != "all_reduce":
        assert one.wrong(wanted.astype(TYPES[coarse]).astype(np.float32), encoding) > 0


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_no_result_is_wrong(broken):
    one = trial("all_reduce")
    found = exact(one)[0].astype(np.float32)
    found[[3, 99]] = broken
    assert one.wrong(found, "fp8_e5m2") == 2


def test_errors_by_hand():
    one = trial("all_gather", part=40, size=2)
    wanted = exact(one)[0]
    found = wanted.copy()
    found[5] += 0.5
    found[70] -= 0.25
    largest, total, scale, count = one.errors(found)
    assert (largest, total, count) == (pytest.approx(0.5), pytest.approx(0.75), 80)
    assert scale == np.abs(wanted).max()
    found[7] = np.nan
    assert np.isnan(one.errors(found)[:2]).all()


def told(results, *argv, ranks=3, file):
    codes, text = bench(ranks, *argv, "--json", str(file))
    assert codes == [0] * ranks
    found = json.loads(file.read_text())["results"]
    file.unlink()
    assert len(found) == len(table(text)) == results
    return found, text


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_all_names_run_and_are_right(name, op, ranks, tmp_path):
    argv = [name, *SIZES, "-o", op, "-c", "2", "--compression", ",".join(NAMES)]
    found, text = told(3 * len(NAMES), *argv, ranks=ranks, file=tmp_path / "run.json")
    assert [row["compression"] for row in found] == [*NAMES] * 3
    assert {cells[8] for cells in table(text)} == {cells[12] for cells in table(text)} == {"0"}
    for row, cells in zip(found, table(text), strict=True):
        assert cells[13] == row["compression"]
        assert row["error_feedback"] == "false"
        if not row["size"]:
            assert row["max_error"] is row["mean_error"] is None
            assert cells[15:] == ["N/A", "N/A"]
            continue
        assert cells[15:] == [f"{row['max_error']:.2e}", f"{row['mean_error']:.2e}"]
        assert 0 <= row["mean_error"] <= row["max_error"] < 0.25
        exactly = ranks == 1 or (row["compression"], name) == ("none", "all_gather")
        assert (row["max_error"] == 0) == exactly
        # Rounding float32 sums may take a few of their steps.
        assert row["compression"] != "none" or row["max_error"] < 1e-6
    for start in range(0, len(found), len(NAMES)):
        if found[start]["size"] >= 2048 and ranks > 1:
            errors = {row["compression"]: row["mean_error"] for row in found[start:][: len(NAMES)]}
            finest_first = [errors[one] for one in ("none", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2")]
            assert all(fine < coarse for fine, coarse in pairwise(finest_first))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_bytes_of_all_ranks_are_counted(name, tmp_path):
    argv = [name, *ONE, "--algorithm", "direct", "--verify", "--compression", "none,bf16,fp8_e4m3"]
    found, text = told(3, *argv, file=tmp_path / "run.json")
    part = found[0]["count"] // (3 if name == "all_reduce" else 1)
    # Each part goes from each rank to each other one, and the results of all_reduce as well.
    messages = 6 * (2 if name == "all_reduce" else 1)
    # Two segments a part may need a scale each.
    exactly = [messages * part * itemsize for itemsize in (4, 2, 1)]
    sent = [row["sent"] for row in found]
    assert sent[:2] == exactly[:2]
    assert 0 < sent[2] - exactly[2] <= messages * (part // 256 + 2)
    assert [row["wire"]["sent"] for row in found] == sent
    assert [cells[-3] for cells in table(text)] == list(map(str, sent))
    assert "# Bytes unlike schedule : 0 OK" in text


def test_error_feedback_shows_the_error_of_a_mean(tmp_path):
    for name in COLLECTIVES:
        argv = [name, *ONE, "--compression", ",".join(NAMES)]
        without, _ = told(5, *argv, file=tmp_path / "run.json")
        found, text = told(5, *argv, "--error-feedback", file=tmp_path / "run.json")
        assert "# Error feedback: errors of the mean of 10 calls on the same values" in text
        assert [row["error_feedback"] for row in found] == ["false"] + ["true"] * 4
        assert {cells[8] for cells in table(text)} == {cells[12] for cells in table(text)} == {"0"}
        for plain, fed_back in zip(without[1:], found[1:], strict=True):
            # Of ten calls only what the last one keeps is missing.
            assert fed_back["mean_error"] < plain["mean_error"] / 4
            assert fed_back["sent"] == plain["sent"]
        assert found[0]["max_error"] == without[0]["max_error"]


class Wrapped:
    """A communicator whose all_reduce is `call(method, *args, **options)`."""

    def __init__(self, comm, call):
        self._comm = comm
        self._call = call

    def __getattr__(self, name):
        found = getattr(self._comm, name)
        if name != "all_reduce":
            return found
        return lambda *args, **options: self._call(found, *args, **options)


@pytest.mark.parametrize("flags", [[], ["--error-feedback"]])
@pytest.mark.parametrize("minus", [["-m", "1"], ["-m", "3"]])
def test_timed_calls_run_on_zeros_and_stay_there(flags, minus):
    seen = []

    def record(method, x, out=None, **options):
        seen.append(set(x.tolist()))
        return method(x, out, **options)

    codes, _ = bench(
        2, "all_reduce", *ONE, *minus, "--compression", "bf16", *flags,
        wrap=lambda comm: Wrapped(comm, record),
    )  # fmt: skip
    assert codes == [0, 0]
    # Two sides, two ranks: a warm-up and an iteration.
    timed = 2 * 2 * 2 * int(minus[1])
    assert all(values == {0.0} for values in seen[-timed:])
    # A check a side, the bytes, and what the errors are of.
    assert len(seen) - timed == 2 * (2 + 1 + (10 if flags else 1))


def test_a_wrong_element_is_counted_and_fails_the_run():
    left = [None]

    def flip(method, x, out=None, *, compression=None, **options):
        result = method(x, out, compression=compression, **options)
        if compression is not None and left:
            left.pop()
            result[-1] = -7 * result[-1] - 7
        return result

    codes, text = bench(
        2, "all_reduce", *ONE, "--compression", "none,bf16", "--error-feedback",
        wrap=lambda comm: Wrapped(comm, flip),
    )  # fmt: skip
    assert codes == [1, 1]
    assert [(cells[8], cells[12]) for cells in table(text)] == [("0", "0"), ("1", "0")]


def test_a_call_that_writes_nothing_is_wrong_and_has_no_error(tmp_path):
    def idle(method, x, out=None, **options):
        return out

    file = tmp_path / "run.json"
    codes, text = bench(
        2, "all_reduce", *ONE, "--compression", "bf16", "--json", str(file),
        wrap=lambda comm: Wrapped(comm, idle),
    )  # fmt: skip
    assert codes == [1, 1]
    assert table(text)[0][8] == str(2 * 768)
    assert table(text)[0][15:] == ["N/A", "N/A"]
    (row,) = json.loads(file.read_text())["results"]
    assert row["max_error"] is row["mean_error"] is None


def test_nothing_is_checked_with_c_0_but_errors_are_told():
    codes, text = bench(2, "all_reduce", *ONE, "-c", "0", "--compression", "bf16")
    assert codes == [0, 0]
    (cells,) = table(text)
    assert (cells[8], cells[12]) == ("N/A", "N/A")
    assert 0 < float(cells[16]) < float(cells[15]) < 2**-7


def test_between_hosts_by_stages():
    options = parse(["all_reduce", *ONE, "--algorithm", "hierarchical,direct,ring", "--verify",
                     "--compression", "none,bf16", "--error-feedback"])  # fmt: skip
    out = io.StringIO()
    codes = pycomm.run_local(
        4, lambda comm: run(options, comm, clock=ticking(), out=out), hosts=[0, 0, 1, 1]
    )
    assert codes == [0] * 4
    rows = [(cells[13], cells[-4]) for cells in table(out.getvalue())]
    assert rows == [
        ("hierarchical", "none"), ("hierarchical", "bf16"), ("direct", "none"),
        ("direct", "bf16"), ("ring", "none"),
    ]  # fmt: skip


def row(found, **more):
    side = make_side(1e-5, 1024, 1.0, wrong=0, per_rank=(1e-5,))
    return Row(1024, 256, "float", "sum", -1, None, side, side, compression=found, **more)


def test_columns_come_last():
    options = parse(["all_reduce", "--compression", "none,bf16"])
    header = type("Header", (), {"peers": ()})
    second, third = report.nccl_header(options, header)[2:]
    ending = "#wrong  compression            sent   max err  mean err"
    assert second.endswith(ending)
    assert third == third.rstrip()
    assert third.endswith(f"{'(B)':>14s}")
    assert len(third) == second.index("sent") + 4
    lines = [
        report.nccl_row(options, row(Compression("bf16", False, 1024, 3.25e-3, 1e-4))),
        report.nccl_row(options, row(Compression("none", False, None, None, None))),
    ]
    assert lines[0].endswith("       0         bf16            1024  3.25e-03  1.00e-04")
    assert lines[1].endswith("       0         none             N/A       N/A       N/A")
    assert {len(line) for line in lines} == {len(second)}
    without = report.nccl_row(parse(["all_reduce"]), row(None))
    assert lines[0].startswith(without)


def test_csv_has_the_same_columns():
    def lines(rows):
        stream = io.StringIO()
        header = type("Header", (), {"peers": (), "collective": "all_reduce", "ranks": 2})
        files.write_csv(stream, header, rows)
        return list(csv.DictReader(io.StringIO(stream.getvalue())))

    found = lines([row(Compression("bf16", True, 1024, 0.5, None))])
    assert len(found) == 2
    for line in found:
        assert list(line)[-5:] == [
            "compression",
            "error_feedback",
            "sent",
            "max_error",
            "mean_error",
        ]
        assert list(line.values())[-5:] == ["bf16", "true", "1024", "0.5", ""]
    assert "compression" not in lines([row(None)])[0]


def test_each_compression_has_a_line_in_the_plot():
    rows = [row(Compression(name, False, 0, 0.0, 0.0)) for name in ("none", "bf16")]
    assert [line.label for line in plot.collect_series(rows)[1]] == ["pycomm", "pycomm bf16"]

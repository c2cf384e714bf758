import csv
import io
import json

import numpy as np
import pytest

from pycomm.bench import files, plot, report
from pycomm.bench.options import parse
from pycomm.bench.results import (
    Device,
    Header,
    PeerResult,
    Row,
    geometric_mean,
    make_side,
    ratio,
    summarize,
)
from pycomm.bench.timing import iteration_stats


def side(microseconds, nbytes=1024, factor=1.0, wrong=0, **more):
    return make_side(microseconds * 1e-6, nbytes, factor, wrong=wrong, per_rank=(1e-6,), **more)


def row(out, in_place, *, size=1024, count=256, root=-1, redop="sum", **more):
    return Row(
        size, count, "float", redop, root, more.pop("algorithm", None), out, in_place, **more
    )


def header(*, ranks=2, peers=()):
    devices = tuple(Device(rank, 4711 + rank, "node7", "Some CPU") for rank in range(ranks))
    return Header(
        "pycomm.bench all_reduce", "all_reduce", ranks, "1.2.3", devices, 5, peers,
        "2026-01-02 03:04:05",
    )  # fmt: skip


PEERS = (("mpi4py", "4.1 (Open MPI v5)"),)


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (0, 7, "   0.00"),
        (0.994, 7, "   0.99"),
        (1234.567, 7, "1234.57"),
        (9999.99, 7, "9999.99"),
        (10000, 7, "10000.0"),
        (99999.94, 7, "99999.9"),
        (100000, 7, " 100000"),
        (9999999, 7, "9999999"),
        (1e7, 7, "1.0e+07"),
        (3.25e18, 7, "3.2e+18"),
        (999.99, 6, "999.99"),
        (1000, 6, "1000.0"),
        (10000, 6, " 10000"),
        (999999, 6, "999999"),
        (1e6, 6, " 1e+06"),
    ],
)
def test_numbers_lose_decimals_to_fit(value, width, text):
    assert report.fixed(value, width) == text


def test_lines_are_those_of_nccl_tests():
    options = parse(["all_reduce", "-b", "8", "-e", "1K", "-f", "4"])
    lines = [*report.preamble(options, header()), *report.nccl_header(options, header())]
    assert lines == [
        "# pycomm version 1.2.3 nccl-headers=0 nccl-library=0",
        "# Collective test starting: pycomm.bench all_reduce",
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 1024 step: 4(factor) warmup iters: 1 iters: 20 "
        "agg iters: 1 validation: 1 graph: 0 unalign: 0",
        "#",
        "# Using devices",
        "#  Rank  0 Group  0 Pid   4711 on      node7 device  0 [host] Some CPU",
        "#  Rank  1 Group  0 Pid   4712 on      node7 device  0 [host] Some CPU",
        "#",
        "# Time: median of 5 blocks of iterations, in turn with all others",
        "#",
        "#                                                    "
        "          out-of-place                       in-place          ",
        "#       size         count      type   redop    root"
        "     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong ",
        "#        (B)    (elements)                          "
        "     (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         ",
    ]
    line = report.nccl_row(options, row(side(10), side(12345.6, factor=0.5, wrong=3)))
    assert line == (
        "        1024           256     float     sum      -1"
        "    10.00    0.10    0.10       0  12345.6    0.00    0.00       3"
    )


def test_steps_in_bytes_blocking_and_one_rank_are_told():
    options = parse(["all_reduce", "-z", "1", "-I", "1"])
    text = "\n".join(report.preamble(options, header(ranks=1)))
    assert "step: 1048576(bytes)" in text
    assert "# Blocking Enabled: barrier after each iteration" in text
    assert "# Per-Iteration Report" in text
    assert "# one rank: nothing crosses a link, busbw is 0" in text


def test_unchecked_and_missing_sides_are_not_numbers():
    options = parse(["send_recv", "-c", "0"])
    line = report.nccl_row(options, row(side(10, wrong=None), None, redop="none"))
    assert line == (
        "        1024           256     float    none      -1"
        "    10.00    0.10    0.10     N/A      N/A     N/A     N/A     N/A"
    )


def test_time_stamps_and_statistics_have_columns_of_their_own():
    options = parse(["all_reduce", "-S", "1", "-I", "1"])
    stats = iteration_stats(np.array([[8e-6, 12e-6]]))
    one = side(10, iterations=stats)
    line = report.nccl_row(options, row(one, one, timestamp="2026-01-02 03:04:05"))
    half = "    10.00    0.10    0.10       0     8.00    12.00    12.00    20.00"
    assert line[52:] == half + half + "  2026-01-02 03:04:05"
    second = report.nccl_header(options, header())[2]
    assert second.endswith("  i_min    i_max    i_p99    i_cv%           timestamp")


def test_peers_come_after_the_columns_of_nccl_tests():
    options = parse(["all_reduce", "--compare", "mpi4py", "--algorithm", "native"])
    peer = PeerResult("mpi4py", side(20), None)
    first, second, third = report.nccl_header(options, header(peers=PEERS))[1:]
    line = report.nccl_row(options, row(side(10), side(5), peers=(peer,), algorithm="native"))
    assert first.rstrip().endswith("mpi4py")
    assert second.endswith(f"#wrong     time   ratio     time   ratio  {'algorithm':>18s}")
    assert third[: len(second)].endswith("(us)     (x)     (us)     (x)")
    assert line.endswith("       0    20.00    2.00      N/A     N/A              native")
    assert len(line) == len(second)
    assert "# Compared with: mpi4py 4.1 (Open MPI v5)" in report.preamble(
        options, header(peers=PEERS)
    )


def test_footer():
    rows = [
        row(side(1, wrong=2), side(1, wrong=1), peers=(PeerResult("mpi4py", side(4), side(9)),))
    ]
    lines = report.nccl_footer(header(peers=PEERS), summarize(rows, ["mpi4py"], None))
    assert lines == [
        "# Out of bounds values : 3 FAILED",
        "# Avg bus bandwidth    : 1.024 ",
        "# mpi4py / pycomm      : 6x (geometric mean of 2 times)",
        "#",
        "# Collective test concluded: pycomm.bench all_reduce",
        "#",
    ]


@pytest.mark.parametrize(
    ("least", "wrong", "verdict", "okay"),
    [
        (None, 0, "Avg bus bandwidth    : 1.024 ", True),
        (None, 1, "Out of bounds values : 1 FAILED", False),
        (1.1, 0, "Avg bus bandwidth    : 1.024 OK", True),
        (1.2, 0, "Avg bus bandwidth    : 1.024 FAILED", False),
    ],
)
def test_verdict(least, wrong, verdict, okay):
    summary = summarize([row(side(1, wrong=wrong), None)], [], least)
    assert f"# {verdict}" in report.nccl_footer(header(), summary)
    assert summary.okay is okay


def test_ratios_without_time_are_left_out():
    assert ratio(0.0, 1.0) is None
    assert ratio(1.0, 0.0) is None
    assert geometric_mean([]) is None
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    nothing = PeerResult("mpi4py", side(0), side(4))
    summary = summarize([row(side(1), side(1), peers=(nothing,))], ["mpi4py"], None)
    assert summary.peer_ratios == (("mpi4py", pytest.approx(4.0), 1),)
    empty = row(side(1), side(1), size=0, peers=(nothing,))
    assert summarize([empty], ["mpi4py"], None).peer_ratios == ()
    assert summarize([], [], None).bandwidth == 0.0


def test_osu_columns():
    options = parse(["all_gather", "--format", "osu", "--compare", "mpi4py"])
    lines = report.osu_header(options, header(peers=PEERS), "float")
    assert lines == [
        "# pycomm all_reduce Latency Test v1.2.3, 2 ranks",
        "# Datatype: float.",
        "# Size         Avg Latency(us)          Validation          mpi4py(us)",
    ]
    measured = row(side(12.5), side(1), peers=(PeerResult("mpi4py", side(20), None),))
    assert report.osu_row(options, measured, 2) == (
        "512                      12.50                Pass               20.00"
    )


def test_osu_columns_without_validation_and_with_the_whole_size():
    options = parse(["all_reduce", "--format", "osu", "-c", "0"])
    assert report.osu_header(options, header(), "int8")[2] == "# Size         Avg Latency(us)"
    assert report.osu_row(options, row(side(2), side(1)), 2) == "1024                      2.00"
    checked = parse(["reduce_scatter", "--format", "osu"])
    wrong = row(side(2, wrong=1), side(1))
    assert report.osu_row(checked, wrong, 2) == "1024                      2.00                Fail"


def full_report(*flags, errors=(), finished=True, **more):
    options = parse(["all_reduce", "-b", "8", "-e", "1K", "-f", "4", *flags])
    rows = [row(side(10, wrong=2, **more), None, peers=(PeerResult("mpi4py", side(20), None),))]
    summary = summarize(rows, ["mpi4py"], 1.0) if finished else None
    found = files.to_json(options, header(peers=PEERS), rows, summary, errors)
    stream = io.StringIO()
    files.write_json(stream, found)
    return json.loads(stream.getvalue())


def test_json_has_the_keys_of_nccl_tests():
    found = full_report()
    assert list(found) == [
        "version", "start_time", "args", "env", "nccl_version", "config", "results",
        "out_of_bounds", "average_bus_bandwidth", "pycomm", "errors", "end_time",
    ]  # fmt: skip
    assert list(found["config"]) == [
        "nthreads", "ngpus", "minimum_bytes", "maximum_bytes", "step_factor", "warmup_iters",
        "iterations", "aggregated_iterations", "validation", "graph", "blocking_collectives",
        "per_iter_timing", "per_iter_skip", "parallel_init", "devices",
    ]  # fmt: skip
    assert found["config"]["devices"][1] == {
        "rank": 1, "group": 0, "pid": 4712, "hostname": "node7", "device": 0,
        "device_hex": "host", "device_info": "Some CPU",
    }  # fmt: skip
    result = found["results"][0]
    assert list(result) == [
        "size", "count", "type", "redop", "root", "out_of_place", "in_place",
        "actual_iterations", "experiment_name", "algorithm", "peers",
    ]  # fmt: skip
    assert result["root"] == "-1"
    assert list(result["out_of_place"]) == ["time", "alg_bw", "bus_bw", "nwrong", "rank_times"]
    assert result["in_place"] is None
    assert result["peers"] == [
        {
            "name": "mpi4py",
            "out_of_place": {
                "time": pytest.approx(20), "alg_bw": pytest.approx(0.0512),
                "bus_bw": pytest.approx(0.0512), "rank_times": [pytest.approx(1)],
                "ratio": pytest.approx(2),
            },
            "in_place": None,
        }
    ]  # fmt: skip
    assert found["pycomm"]["ranks"] == 2
    assert found["pycomm"]["peers"][0]["ratio"] == pytest.approx(2)


def test_json_booleans_are_strings():
    found = full_report("-z", "1")
    assert found["config"]["blocking_collectives"] == "true"
    assert found["config"]["per_iter_timing"] == "false"
    assert found["config"]["parallel_init"] == "false"
    assert found["out_of_bounds"] == {"count": 2, "okay": "false"}
    assert found["average_bus_bandwidth"]["okay"] == "false"


def test_json_per_iteration_keys():
    stats = iteration_stats(np.array([[8e-6, 12e-6], [9e-6, 10e-6]]))
    found = full_report("-I", "1", iterations=stats)["results"][0]["out_of_place_per_iter"]
    assert list(found) == [
        "skipped_iterations", "min_us", "max_us", "avg_us", "p50_us", "p95_us", "p99_us",
        "stdev_us", "cv_pct", "times_us", "per_process_max_times_us",
    ]  # fmt: skip
    assert found["times_us"] == [pytest.approx(9), pytest.approx(12)]
    assert len(found["per_process_max_times_us"]) == 2


def test_json_of_a_run_that_did_not_end():
    found = full_report(errors=["it broke"], finished=False)
    assert found["errors"] == ["it broke"]
    assert "out_of_bounds" not in found


def test_json_keeps_secrets_of_the_environment_out(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    env = full_report()["env"]
    assert "NCCL_DEBUG=WARN" in env
    assert not any("SOME_TOKEN" in entry for entry in env)


def test_json_never_holds_what_is_no_number():
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(io.StringIO(), {"time": float("inf")})


def test_json_files_are_never_overwritten(tmp_path):
    path = tmp_path / "run.json"
    names = []
    for _ in range(3):
        with files.open_new(str(path)) as stream:
            names.append(stream.name)
    assert names == [str(path), f"{path}.0", f"{path}.1"]


def test_csv_has_a_line_for_each_side():
    stream = io.StringIO()
    rows = [
        row(side(10), side(5, wrong=None), peers=(PeerResult("mpi4py", side(20), None),)),
        row(side(1), None, root=1, algorithm="native", peers=(PeerResult("mpi4py", None, None),)),
    ]
    files.write_csv(stream, header(peers=PEERS), rows)
    lines = list(csv.DictReader(io.StringIO(stream.getvalue())))
    assert [(line["side"], line["time_us"], line["wrong"]) for line in lines] == [
        ("out_of_place", "10.000", "0"),
        ("in_place", "5.000", ""),
        ("out_of_place", "1.000", "0"),
    ]
    assert [line["mpi4py_ratio"] for line in lines] == ["2", "", ""]
    assert [line["algorithm"] for line in lines] == ["", "", "native"]
    assert lines[0]["collective"] == "all_reduce"
    assert lines[0]["ranks"] == "2"


def test_axis_labels():
    assert [plot.size_label(value) for value in (8, 1024, 1536, 8 << 20, 2 << 30)] == [
        "8 B", "1 KiB", "1.5 KiB", "8 MiB", "2 GiB",
    ]  # fmt: skip
    assert [plot.time_label(value) for value in (0.5, 10, 1e3, 1e7)] == [
        "0.5 µs", "10 µs", "1 ms", "10 s",
    ]  # fmt: skip


def test_a_line_for_each_algorithm_and_peer_pycomm_first():
    peers = (PeerResult("mpi4py", side(20), None),)
    rows = [
        row(side(10), side(5), algorithm=algorithm, size=size, peers=peers)
        for size in (0, 64, 256)
        for algorithm in ("auto", "native")
    ]
    place, lines = plot.collect_series(rows)
    assert place == "out_of_place"
    assert [line.label for line in lines] == ["pycomm auto", "pycomm native", "mpi4py"]
    assert [point[0] for point in lines[2].points] == [64, 256]


def test_the_side_that_compares_more_is_drawn():
    rows = [row(side(10), side(5), peers=(PeerResult("gloo", None, side(9)),))]
    place, lines = plot.collect_series(rows)
    assert place == "in_place"
    assert [line.label for line in lines] == ["pycomm", "gloo"]


def test_lines_name_what_differs():
    rows = [row(side(1), None, root=root, redop="none") for root in (0, 1)]
    assert [line.label for line in plot.collect_series(rows)[1]] == [
        "pycomm float root 0",
        "pycomm float root 1",
    ]


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG\r\n"), ("a.svg", b"<?xml")])
def test_a_picture_is_written(tmp_path, name, start):
    rows = [row(side(size / 9), side(5), size=size) for size in (8, 512, 1 << 20)]
    path = tmp_path / name
    plot.draw(str(path), parse(["all_reduce"]), header(), rows)
    assert path.read_bytes().startswith(start)


def test_a_picture_without_any_point_is_written(tmp_path):
    path = tmp_path / "empty.png"
    plot.draw(str(path), parse(["all_reduce"]), header(), [row(side(0), side(0))])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_other_picture_formats_are_refused():
    assert plot.why_no_plot("x.bmp") == "--plot x.bmp: the name must end in .png, .svg, .pdf"

"""What memory allows: the work that is timed, the line that says what is reached, the options."""

import json

import numpy as np
import pytest
from support.benchmark import bench

from pycomm.bench import report, roofline
from pycomm.bench.options import Stop, parse
from pycomm.bench.results import Roofline, Row, make_side

SMALL = ["-b", "1K", "-e", "4K", "-f", "4", "-n", "2", "--roofline"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 4, 1001, 200_000])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_work_is_one_ranks_share_of_an_all_reduce(ranks, count, in_place):
    source = np.arange(count, dtype=np.float64)
    target = source if in_place else np.zeros(count)
    share = count // ranks
    expected = sum(source[rank * share : (rank + 1) * share] for rank in range(ranks))
    before = target.copy()
    roofline.work(source, target, ranks)()
    for rank in range(ranks):
        np.testing.assert_array_equal(target[rank * share : (rank + 1) * share], expected)
    np.testing.assert_array_equal(target[ranks * share :], before[ranks * share :])
    # All of the input is read and all of the output written, but for what cannot be divided.
    assert roofline.moved_bytes(8 * count) == 8 * 2 * count


def row(out_of_place, in_place, limit):
    sides = [
        None if seconds is None else make_side(seconds, 1 << 20, 1.0, wrong=0, per_rank=(seconds,))
        for seconds in (out_of_place, in_place)
    ]
    return Row(1 << 20, 1 << 18, "float", "sum", -1, None, *sides, roofline=limit)


def limit(seconds):
    side = make_side(seconds, 1 << 20, 1.0, wrong=None, per_rank=(seconds,))
    return Roofline(2 << 20, side, side)


def test_the_line_says_what_is_reached():
    text = report.roofline_line(row(2e-4, 1.6e-4, limit(1e-4)))
    assert text == (
        "#   roofline: 2097152 B a rank; out of place 100.00 us (21.0 GB/s): 50%, "
        "in place 100.00 us (21.0 GB/s): 62%"
    )
    assert report.roofline_line(row(2e-4, 1e-4, None)) is None
    one_side = report.roofline_line(row(1e-4, None, limit(1e-4)))
    assert "in place 100.00 us (21.0 GB/s): N/A" in one_side
    # A clock that is too coarse for it says nothing.
    assert "0.00 us (0.0 GB/s): " in report.roofline_line(row(0.0, 0.0, limit(0.0)))


def test_a_run_prints_it_below_each_row_and_writes_it_as_json(tmp_path):
    file = tmp_path / "out.json"
    codes, text = bench(2, "all_reduce", *SMALL, "--json", str(file))
    assert codes == [0, 0]
    lines = text.splitlines()
    sizes = [index for index, line in enumerate(lines) if line.split()[:1] in (["1024"], ["4096"])]
    assert len(sizes) == 2
    for index, nbytes in zip(sizes, (2048, 8192), strict=True):
        assert lines[index + 1].startswith(f"#   roofline: {nbytes} B a rank; ")
    told = json.loads(file.read_text())
    assert [one["roofline"]["bytes"] for one in told["results"]] == [2048, 8192]


def test_what_has_no_roofline():
    assert parse(["all_reduce", *SMALL]).roofline
    for words in (["all_gather"], ["all_reduce", "-o", "max"], ["all_reduce", "--format", "osu"]):
        with pytest.raises(Stop):
            parse([*words, *SMALL])
    assert bench(1, "all_reduce", *SMALL)[0] == [2]
    # Fewer elements than ranks: there is no line, and no error.
    codes, text = bench(3, "all_reduce", "-b", "8", "-e", "8", "-n", "1", "--roofline")
    assert codes == [0, 0, 0]
    assert "roofline:" not in text

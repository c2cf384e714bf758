import math

import numpy as np
import pytest

from pycomm.bench.cases import CASES, bus_factor, place
from pycomm.bench.results import make_side


@pytest.mark.parametrize(
    ("name", "one", "two", "four"),
    [
        ("all_reduce", 0, 1, 1.5),
        ("reduce_scatter", 0, 0.5, 0.75),
        ("all_gather", 0, 0.5, 0.75),
        ("all_to_all", 0, 0.5, 0.75),
        ("gather", 0, 0.5, 0.75),
        ("scatter", 0, 0.5, 0.75),
        ("broadcast", 0, 1, 1),
        ("reduce", 0, 1, 1),
        ("send_recv", 0, 1, 1),
        ("barrier", 0, 0, 0),
    ],
)
def test_bus_bandwidth_over_algorithm_bandwidth(name, one, two, four):
    assert [bus_factor(CASES[name], size) for size in (1, 2, 4)] == [one, two, four]


def test_bandwidths_by_hand():
    side = make_side(0.5, 4_000_000_000, 1.5)
    assert (side.algbw, side.busbw) == (8.0, 12.0)


@pytest.mark.parametrize("seconds", [0.0, -1e-9])
def test_no_time_gives_no_bandwidth(seconds):
    side = make_side(seconds, 1024, 1.5)
    assert (side.algbw, side.busbw) == (0.0, 0.0)
    assert math.isfinite(side.seconds)


@pytest.mark.parametrize(
    ("name", "nbytes", "itemsize", "size", "counts"),
    [
        ("all_reduce", 1000, 4, 3, (250, 250, 250)),
        ("broadcast", 7, 4, 3, (1, 1, 1)),
        ("send_recv", 64, 8, 2, (8, 8, 8)),
        # 250 elements, 83 a rank, rounded down to 80: 16 bytes are 4 elements.
        ("all_gather", 1000, 4, 3, (80, 240, 80)),
        ("reduce_scatter", 1000, 4, 3, (240, 80, 80)),
        ("all_to_all", 1000, 4, 3, (240, 240, 80)),
        ("gather", 1000, 4, 3, (80, 240, 80)),
        ("scatter", 1000, 4, 3, (240, 80, 80)),
        ("all_gather", 64, 1, 4, (16, 64, 16)),
        ("all_gather", 63, 1, 4, (0, 0, 0)),
        ("all_gather", 64, 16, 2, (2, 4, 2)),
        ("barrier", 64, 4, 2, (0, 0, 0)),
    ],
)
def test_counts(name, nbytes, itemsize, size, counts):
    found = CASES[name].counts(nbytes, itemsize, size)
    assert (found.send, found.recv, found.param) == counts


def where(array, send, recv):
    """Name a placement's array: which buffer, and which elements of it."""
    if array is None:
        return None
    base = "send" if np.shares_memory(array, send) else "recv"
    buffer = send if base == "send" else recv
    start = (array.ctypes.data - buffer.ctypes.data) // array.itemsize
    return f"{base}[{start}:{start + array.size}]"


S, R = "send[0:8]", "recv[0:8]"


@pytest.mark.parametrize(
    ("name", "rank", "in_place", "x", "out", "result"),
    [
        ("all_reduce", 1, False, S, R, R),
        ("all_reduce", 1, True, R, None, R),
        ("broadcast", 1, False, S, R, R),
        ("broadcast", 1, True, R, None, R),
        ("reduce", 0, False, S, R, R),
        ("reduce", 1, False, S, R, None),
        ("reduce", 0, True, R, None, R),
        ("reduce_scatter", 1, False, S, "recv[0:4]", "recv[0:4]"),
        ("reduce_scatter", 1, True, S, "send[4:8]", "send[4:8]"),
        ("all_gather", 1, False, "send[0:4]", R, R),
        ("all_gather", 1, True, "recv[4:8]", R, R),
        ("gather", 0, True, "recv[0:4]", R, R),
        ("gather", 1, True, "send[0:4]", None, None),
        ("scatter", 0, True, S, "send[0:4]", "send[0:4]"),
        ("scatter", 1, False, None, "recv[0:4]", "recv[0:4]"),
        ("all_to_all", 1, False, S, R, R),
        ("all_to_all", 1, True, R, R, R),
        ("send_recv", 1, False, S, R, R),
    ],
)
def test_arrays_lie_where_nccl_tests_puts_them(name, rank, in_place, x, out, result):
    case = CASES[name]
    send, recv = np.zeros(16, np.float32), np.zeros(16, np.float32)
    counts = case.counts(32, 4, 2)
    found = place(case, rank, 0, counts, send, recv, in_place=in_place)
    assert [where(array, send, recv) for array in (found.x, found.out, found.result)] == [
        x,
        out,
        result,
    ]


def test_only_the_root_of_a_broadcast_has_an_input():
    case = CASES["broadcast"]
    send, recv = np.zeros(4, np.int8), np.zeros(4, np.int8)
    counts = case.counts(4, 1, 2)
    for in_place in (False, True):
        at_root = place(case, 1, 1, counts, send, recv, in_place=in_place)
        elsewhere = place(case, 0, 1, counts, send, recv, in_place=in_place)
        assert at_root.source is not None
        assert elsewhere.source is None

import numpy as np
import pytest

from pycomm.bench.timing import (
    Contender,
    combine,
    iteration_stats,
    measure,
    median_of_blocks,
    split_iterations,
    stepper,
)


@pytest.mark.parametrize(
    ("iterations", "blocks"),
    [
        (1, (1,)),
        (4, (1, 1, 1, 1)),
        (5, (1, 1, 1, 1, 1)),
        (7, (2, 2, 1, 1, 1)),
        (20, (4, 4, 4, 4, 4)),
        (23, (5, 5, 5, 4, 4)),
    ],
)
def test_iterations_are_divided_into_blocks(iterations, blocks):
    assert split_iterations(iterations) == blocks


class Machine:
    """A clock that only calls move, and a record of what was called."""

    def __init__(self):
        self.now = 100.0
        self.calls = []

    def clock(self):
        return self.now

    def call(self, name, *seconds):
        left = list(seconds)

        def run():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_blocks_are_taken_in_turn_and_start_with_a_barrier():
    machine = Machine()
    contenders = [
        Contender(machine.call("a", 1.0), (2, 1)),
        Contender(machine.call("b", 0.25), (1, 1)),
    ]
    blocks, iterations = measure(
        contenders, barrier=machine.call("barrier", 50.0), clock=machine.clock
    )
    assert " ".join(machine.calls) == "barrier a a barrier b barrier a barrier b"
    assert blocks.tolist() == [[1.0, 1.0], [0.25, 0.25]]
    assert [seconds.size for seconds in iterations] == [0, 0]


def test_single_iterations_are_timed_when_asked_for():
    machine = Machine()
    contender = Contender(machine.call("a", 1.0, 2.0, 4.0), (2, 1))
    blocks, iterations = measure(
        [contender], barrier=machine.call("barrier", 9.0), clock=machine.clock, each=True
    )
    assert iterations[0].tolist() == [1.0, 2.0, 4.0]
    assert blocks.tolist() == [[1.5, 4.0]]


def test_settling_is_not_timed():
    machine = Machine()
    contender = Contender(machine.call("a", 1.0), (3,), settle=machine.call("settle", 8.0))
    blocks, _ = measure([contender], barrier=machine.call("barrier", 1.0), clock=machine.clock)
    assert blocks.tolist() == [[1.0]]
    assert machine.calls.count("settle") == 3


class Waited:
    def __init__(self, log):
        self.log = log
        log.append("start")

    def wait(self):
        self.log.append("wait")


@pytest.mark.parametrize(
    ("wait_each", "expected"),
    [(False, "start start wait wait barrier"), (True, "start wait start wait barrier")],
)
def test_aggregated_calls_are_issued_then_waited_for(wait_each, expected):
    log = []

    def call(async_op):
        assert async_op
        return Waited(log)

    stepper(call, aggregate=2, barrier=lambda: log.append("barrier"), wait_each=wait_each)()
    assert log == expected.split()


def test_a_plain_call_is_not_wrapped():
    def call():
        pass

    assert stepper(call) is call


def test_times_are_combined_over_ranks():
    times = np.array([[4.0, 1.0], [2.0, 5.0], [3.0, 3.0]])
    found = [combine(times, average).tolist() for average in range(4)]
    assert found == [[4.0, 1.0], [3.0, 3.0], [2.0, 1.0], [4.0, 5.0]]


def test_the_median_drops_a_slow_spell():
    assert median_of_blocks(np.array([1.0, 1.1, 900.0, 1.2, 0.9])) == 1.1


def test_statistics_over_iterations_use_the_slowest_rank():
    stats = iteration_stats(np.array([[1.0, 2.0, 3.0, 10.0], [2.0, 1.0, 3.0, 4.0]]))
    assert stats.times == (2.0, 2.0, 3.0, 10.0)
    assert (stats.minimum, stats.maximum, stats.mean) == (2.0, 10.0, 4.25)
    assert (stats.p50, stats.p95, stats.p99) == (3.0, 10.0, 10.0)
    assert stats.stdev == pytest.approx(3.3447720)
    assert stats.cv_percent == pytest.approx(78.70052)
    assert stats.per_rank == ((1.0, 2.0, 3.0, 10.0), (2.0, 1.0, 3.0, 4.0))


def test_percentiles_of_a_hundred_and_of_one():
    stats = iteration_stats(np.arange(1.0, 101.0)[None, :])
    assert (stats.p50, stats.p95, stats.p99) == (51.0, 95.0, 99.0)
    one = iteration_stats(np.zeros((1, 1)))
    assert (one.p99, one.cv_percent) == (0.0, 0.0)

"""Samples to states: quick to see a fault, slow to trust again, and never from silence."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm.errors import ArgumentValueError
from pycomm.topology.graph import State
from pycomm.topology.health import Health, Rules, Verdict
from pycomm.topology.samples import Sample

UP, DEGRADED, DOWN, UNKNOWN = State.UP, State.DEGRADED, State.DOWN, State.UNKNOWN


def sample(state: State = UP, **facts: object) -> Sample:
    return replace(Sample("mlx5_0", "infiniband", 0.0, state), **facts)


def feed(health: Health, *samples: Sample, start: float = 0.0, step: float = 1.0) -> list[Verdict]:
    """Add samples, one after each `step`, and return the verdicts."""
    times = [start + step * index for index in range(len(samples))]
    return [health.add(replace(one, at=now), now) for one, now in zip(samples, times, strict=True)]


def states(verdicts: list[Verdict]) -> list[State]:
    return [verdict.state for verdict in verdicts]


def test_what_nobody_looked_at_is_unknown() -> None:
    verdict = Health().verdict("mlx5_0", 0.0)
    assert verdict.state is UNKNOWN
    assert "nobody" in verdict.reason


def test_the_first_look_is_believed() -> None:
    assert states(feed(Health(), sample(UP))) == [UP]
    assert states(feed(Health(), sample(DOWN, reason="no carrier"))) == [DOWN]


def test_down_at_once_and_back_after_good_looks_in_a_row() -> None:
    came = feed(
        Health(Rules(good_probes=3)),
        sample(UP), sample(DOWN, reason="no carrier"), sample(UP), sample(UP), sample(UP),
    )  # fmt: skip
    assert states(came) == [UP, DOWN, DOWN, DOWN, UP]
    assert came[2].reason == "no carrier; better in 1 of 3 looks since"
    assert "3 good looks" in came[4].reason


def test_a_flapping_port_is_never_trusted() -> None:
    flapping = [sample(DOWN), sample(UP), sample(UP)] * 5
    assert set(states(feed(Health(Rules(good_probes=3)), *flapping))) == {DOWN}


def test_from_down_by_way_of_degraded() -> None:
    came = feed(Health(Rules(good_probes=2)), *map(sample, (DOWN, DEGRADED, DEGRADED, UP, UP)))
    assert states(came) == [DOWN, DOWN, DEGRADED, DEGRADED, UP]


def test_cannot_tell_changes_nothing_until_its_time_is_over() -> None:
    health = Health(Rules(ttl=10))
    blind = sample(UNKNOWN, reason="state: Invalid argument")
    assert states(feed(health, sample(UP), blind, blind)) == [UP, UP, UP]
    assert health.verdict("mlx5_0", 9.9).state is UP
    late = health.verdict("mlx5_0", 11.0)
    assert late.state is UNKNOWN
    assert "Invalid argument" in late.reason
    assert states(feed(Health(), blind)) == [UNKNOWN]


def test_cannot_tell_is_not_a_good_look() -> None:
    came = feed(Health(Rules(good_probes=2)), *map(sample, (DOWN, UP, UNKNOWN, UNKNOWN, UP)))
    assert states(came) == [DOWN, DOWN, DOWN, DOWN, UP]


def counted(**counters: int) -> Sample:
    return sample(counters=tuple(counters.items()))


def test_old_errors_do_not_count_new_ones_do() -> None:
    came = feed(
        Health(Rules(errors=10, good_probes=1)),
        counted(symbol_error=5000), counted(symbol_error=5008), counted(symbol_error=5100),
        counted(symbol_error=5100),
    )  # fmt: skip
    assert states(came) == [UP, UP, DEGRADED, UP]
    assert came[2].reason == "symbol_error grew by 92 in 1.0 s to 5100"


def test_one_loss_of_the_link_is_enough() -> None:
    came = feed(Health(), counted(link_downed=3), counted(link_downed=4))
    assert came[1].state is DEGRADED
    came = feed(
        Health(), sample(counters=(("nvlink3.recovery", 0),)),
        sample(counters=(("nvlink3.recovery", 1),)),
    )  # fmt: skip
    assert came[1].state is DEGRADED


def test_a_reset_counter_counts_from_zero() -> None:
    few, many = (
        feed(Health(), counted(symbol_error=900), counted(symbol_error=3))[1],
        feed(Health(), counted(symbol_error=900), counted(symbol_error=300))[1],
    )
    assert few.state is UP
    assert many.state is DEGRADED
    assert "grew by 300" in many.reason


def test_a_saturated_counter_is_no_fault_by_itself() -> None:
    came = feed(
        Health(), counted(link_downed=255), counted(link_downed=255), counted(link_downed=255)
    )
    assert states(came) == [UP, UP, UP]
    came = feed(Health(), counted(link_downed=254), counted(link_downed=255))
    assert "where it sticks" in came[1].reason


def test_a_counter_that_appears_late_has_no_past() -> None:
    came = feed(Health(), counted(), counted(link_downed=255), counted(link_downed=255))
    assert states(came) == [UP, UP, UP]


def test_slow_against_its_own_rate() -> None:
    health = Health(Rules(slow=0.5, recovered=0.7, good_probes=2))
    rates = [100.0, 49.0, 60.0, 71.0, 90.0]
    came = feed(health, *(sample(rate=100e6, measured=rate * 1e6) for rate in rates))
    assert states(came) == [UP, DEGRADED, DEGRADED, DEGRADED, UP]
    assert came[1].reason == "measured 49 MB/s, 49% of what it should carry, 100 MB/s"


def test_slow_against_what_is_usual() -> None:
    came = feed(Health(), sample(measured=100e6), sample(measured=120e6), sample(measured=12e6))
    assert states(came) == [UP, UP, DEGRADED]
    assert "11% of what it usually carries, 110 MB/s" in came[2].reason
    assert came[2].rate == 110e6


def test_one_look_that_is_too_good_does_no_harm() -> None:
    rates = [119.0, 173.0, 12.0, *[119.0] * 3]
    came = feed(Health(), *(sample(measured=rate * 1e6) for rate in rates))
    assert states(came) == [UP, UP, DEGRADED, DEGRADED, DEGRADED, UP]


def test_the_gravest_of_several_probes() -> None:
    health = Health()
    health.add(sample(UP), 0.0)
    health.add(replace(sample(UNKNOWN, reason="no PCI"), probe="pci"), 0.0)
    assert health.verdict("mlx5_0", 0.0).state is UP
    health.add(replace(sample(DEGRADED, reason="x8 of x16"), probe="pci"), 0.0)
    assert health.verdict("mlx5_0", 0.0) == Verdict(DEGRADED, "x8 of x16")
    health.add(sample(DOWN, reason="polling"), 1.0)
    assert health.verdict("mlx5_0", 1.0) == Verdict(DOWN, "polling")


@pytest.mark.parametrize(
    "wrong",
    [{"good_probes": 0}, {"ttl": 0}, {"ttl": float("nan")}, {"slow": 0.9}, {"errors": -1}],
)
def test_rules_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentValueError):
        Rules(**wrong)


@given(st.lists(st.sampled_from([UP, DEGRADED, DOWN, UNKNOWN]), max_size=40), st.integers(1, 4))
def test_up_only_after_good_looks_alone(looks: list[State], good: int) -> None:
    """However samples come: up means that the last known ones were up."""
    came = states(feed(Health(Rules(good_probes=good, ttl=1e9)), *map(sample, looks)))
    known: list[State] = []
    for look, state in zip(looks, came, strict=True):
        if look is not UNKNOWN:
            known.append(look)
        if state is UP:
            assert set(known[-good:]) == {UP}
        assert (state is UNKNOWN) == (not known)

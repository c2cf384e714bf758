"""The topology manager on threads as ranks: one decides, all adopt, at the same call."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm.algorithms.schedule import Schedule, Send
from pycomm.topology import manager
from pycomm.topology.adopted import TAGS
from pycomm.topology.graph import Gpu, Host, Nic, State, Topology
from pycomm.topology.manager import TopologyManager
from pycomm.topology.probes import peer
from pycomm.topology.samples import Findings, Sample

Probe = Callable[[str, float], Findings]


def looks(states: list[State]) -> Probe:
    """A probe of one NIC that says these states one after the other, the last one for ever."""
    rest = list(states)

    def probe(host: str, now: float) -> Findings:
        state = rest.pop(0) if len(rest) > 1 else rest[0]
        nic = Nic("mlx5_0", host, device="mlx5_0")
        sample = Sample("mlx5_0", "infiniband", now, state, "polling")
        return Findings(Topology(hosts=(Host(host),), nics=(nic,)), (sample,))

    return probe


def quiet(comm: pycomm.Communicator, probe: Probe | None = None, **options: Any) -> TopologyManager:
    """A manager that looks when it is told to, at nothing but what `probe` says."""
    return TopologyManager(
        comm, background=False, measure=False, probe=probe or looks([State.UP]), **options
    )


def test_groups_and_reasons() -> None:
    def rank(comm: pycomm.Communicator) -> Any:
        with TopologyManager(comm, background=False, probe=looks([State.UP])) as topology:
            x = np.array([comm.rank])
            host = topology.group("host")
            rail = topology.get_group_by_tag("rail_local")
            assert host is not None
            assert rail is not None
            assert topology.group("host") is host
            leaders = topology.get_group_by_tag("inter_host")
            everybody = topology.get_group_by_tag("checkpoint_broadcast")
            assert everybody is not None
            return (
                [int(group.all_reduce(x.copy())[0]) for group in (host, rail, everybody)],
                leaders is not None,
                topology.groups("host"),
                [(pair.a, pair.b) for pair in topology.snapshot.pairs],
                topology.explain(),
            )

    told = pycomm.run_local(4, rank, hosts=[0, 1, 0, 1])
    assert [one[0] for one in told] == [[2, 1, 6], [4, 1, 6], [2, 5, 6], [4, 5, 6]]
    assert [one[1] for one in told] == [True, True, False, False]
    assert all(one[2:] == told[0][2:] for one in told)
    assert told[0][2] == ((0, 2), (1, 3))
    assert told[0][3] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert "host: {0, 2} {1, 3}: 2 hosts, told apart by boot id and namespaces" in told[0][4]
    assert "nvlink: unknown: no rank works on a GPU" in told[0][4]


def test_every_tag_names_a_kind_of_group() -> None:
    def rank(comm: pycomm.Communicator) -> set[str]:
        with quiet(comm) as topology:
            return {one.name for one in topology.snapshot.decisions}

    (kinds,) = pycomm.run_local(1, rank)
    assert {kind for kind, _ in TAGS.values()} <= kinds


def test_a_change_is_adopted_by_all_and_comes_back_after_good_looks() -> None:
    seen: list[tuple[int, int, int]] = []

    def rank(comm: pycomm.Communicator) -> list[tuple[int, State, bool]]:
        fault = [State.UP, State.DOWN, *[State.UP] * 9] if comm.rank == 1 else [State.UP]
        told = []
        with quiet(comm, looks(fault), good_probes=2) as topology:
            topology.on_change(
                lambda before, after: seen.append((comm.rank, before.epoch, after.epoch))
            )
            first = topology.group("world")
            for _ in range(5):
                nic = topology.snapshot.topology.nics[1]
                told.append((topology.epoch, nic.state, topology.group("world") is first))
                topology.refresh()
        return told

    told = pycomm.run_local(2, rank, hosts=[0, 1])
    assert told[0] == told[1]
    assert [one[:2] for one in told[0]] == [
        (1, State.UP), (2, State.DOWN), (2, State.DOWN), (3, State.UP), (3, State.UP)
    ]  # fmt: skip
    assert all(one[2] for one in told[0])  # the same ranks: the same communicator
    assert sorted(seen) == [(0, 1, 2), (0, 2, 3), (1, 1, 2), (1, 2, 3)]


def test_a_group_whose_ranks_change_is_made_anew() -> None:
    def gpu(host: str, now: float, states: list[State]) -> Findings:
        state = states.pop(0) if len(states) > 1 else states[0]
        one = Gpu("gpu0", host, 0, "0000:01:00.0")
        sample = Sample("gpu0", "nvml", now, state, "fell off the bus")
        return Findings(Topology(hosts=(Host(host),), gpus=(one,)), (sample,))

    def rank(comm: pycomm.Communicator) -> Any:
        states = [State.UP, State.DOWN] if comm.rank == 2 else [State.UP]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager.Seat, "device_bus_id", lambda self: "0000:01:00.0")
            comm.barrier()
            made = quiet(comm, lambda host, now: gpu(host, now, states))
            comm.barrier()
        with made as topology:
            before = topology.group("healthy")
            assert before is not None
            topology.refresh()
            after = topology.group("healthy")
            sizes = before.size, None if after is None else after.size
            if after is not None:
                with pytest.raises(pycomm.CommError, match="closed"):
                    before.barrier()
            return sizes, topology.groups("healthy")

    told = pycomm.run_local(3, rank, hosts=[0, 1, 2])
    assert told == [((3, 2), ((0, 1),)), ((3, 2), ((0, 1),)), ((3, None), ((0, 1),))]


def test_ranks_never_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 random results of probes, of two NICs on four hosts with skewed clocks."""
    monkeypatch.setattr(manager, "_ASKING", 1e9)  # before every call
    calls, hosts = 1250, 4

    def rank(comm: pycomm.Communicator) -> list[tuple[str, str, int, Any]]:
        chance = random.Random(comm.rank)
        skew = chance.uniform(-1e6, 1e6)

        def probe(host: str, now: float) -> Findings:
            nics = tuple(Nic(f"mlx5_{number}", host) for number in range(2))
            samples = tuple(
                Sample(
                    nic.name, "infiniband", now + skew, chance.choice(list(State)), "by chance",
                    (("symbol_error", chance.randrange(100)),), 1e9,
                    chance.choice([None, chance.uniform(1e8, 1e9)]),
                )
                for nic in nics
            )  # fmt: skip
            return Findings(Topology(hosts=(Host(host),), nics=nics), samples)

        told = []
        x = np.zeros(1)
        # Each call is a time of asking, and each of these one of looking.
        options = {"interval": 1e-9, "overhead": 1.0, "good_probes": 2, "measure": False}
        topology = TopologyManager(comm, probe=probe, **options)
        prober = topology._prober
        assert prober is not None
        prober.close()  # the look is here, so that there is one for each call
        for _ in range(calls):
            prober.take()
            prober.look()
            comm.all_reduce(x)
            snapshot = topology.snapshot
            choices = comm._engine.choices
            told.append((snapshot.hash, snapshot.plan_hash, snapshot.epoch, choices.groups))
        topology.close()
        return told

    told = pycomm.run_local(hosts, rank, hosts=list(range(hosts)))
    assert all(one == told[0] for one in told)
    assert len({one[2] for one in told[0]}) > calls / 8, "next to nothing has changed"


def test_a_change_comes_beside_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(comm: pycomm.Communicator) -> tuple[int, int]:
        states = [State.UP, State.DOWN]
        x = np.zeros(1)
        with TopologyManager(
            comm, interval=0.05, overhead=1.0, probe=looks(states), measure=False
        ) as topology:
            plan = comm.plan("all_reduce", x)
            ends = time.monotonic() + 20
            number = 0
            while topology.epoch == 1 and time.monotonic() < ends:
                number += 1
                plan() if number % 2 else comm.all_reduce(x)
            return topology.epoch, number

    told = pycomm.run_local(2, rank)
    assert told[0] == told[1]
    assert told[0][0] == 2


def test_nothing_is_measured_while_works_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(peer, "measure", lambda *rest: measured.append(rest) or ())

    def rank(comm: pycomm.Communicator) -> list[int]:
        with TopologyManager(comm, background=False, probe=looks([State.UP])) as topology:
            told = []
            x = np.zeros(4)
            comm.barrier()
            told.append(len(measured))
            work = comm.recv(x, 0, async_op=True) if comm.rank == 1 else None
            topology.refresh()
            comm.barrier()
            told.append(len(measured))
            if work is None:
                comm.send(x, 1)
            else:
                work.wait()
            topology.refresh()
            comm.barrier()
            told.append(len(measured))
            return told

    assert pycomm.run_local(2, rank, hosts=[0, 1]) == [[2, 2, 4]] * 2


def test_works_in_flight_go_on_while_ranks_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank waits for a work while the other asks for news before its next call."""
    monkeypatch.setattr(manager, "_ASKING", 1e9)

    def rank(comm: pycomm.Communicator) -> bool:
        with TopologyManager(comm, measure=False, probe=looks([State.UP])) as topology:
            x, y = np.ones(1 << 16), np.ones(4)
            for _ in range(40):
                x[:] = 1
                work = comm.all_reduce(x, algorithm="ring", async_op=True)
                if comm.rank == 0:
                    work.wait()
                comm.all_reduce(y, op="max")
                work.wait()
                assert (x == 3).all()
            return topology.epoch == 1

    assert pycomm.run_local(3, rank, timeout=20) == [True] * 3


def plans_with(
    rates: dict[tuple[int, int], float], hosts: list[int], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[pycomm.Plan, pycomm.Plan]]:
    """The plans of each rank, before and after pairs of ranks were measured to be that slow."""
    slowed = [False]

    def measure(transport: Any, rounds: peer.Rounds, *rest: Any) -> tuple[Sample, ...]:
        mine = [pair for pairs in rounds for pair in pairs if pair[0] == transport.rank]
        return tuple(
            Sample(
                peer.pair_name(*pair), "peer", 0.0, State.UP, latency=1e-4,
                measured=1e8 * (rates.get(pair, 1.0) if slowed[0] else 1.0),
            )
            for pair in mine
        )  # fmt: skip

    monkeypatch.setattr(peer, "measure", measure)

    def rank(comm: pycomm.Communicator) -> tuple[pycomm.Plan, pycomm.Plan]:
        x = np.full(100_000, float(comm.rank))
        with TopologyManager(comm, background=False, probe=looks([State.UP])) as topology:
            before = comm.plan("all_reduce", x)
            comm.barrier()
            slowed[0] = True
            comm.barrier()
            topology.refresh(thorough=True)
            after = comm.plan("all_reduce", x)
            after()
            assert (x == sum(range(comm.size))).all()
        return before, after

    return pycomm.run_local(len(hosts), rank, hosts=hosts)


def test_a_slow_road_carries_less(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {(1, 3): 0.25, (1, 2): 0.25, (0, 3): 0.25}  # rank 1, and rank 3 on the other host
    plans = plans_with(rates, [0, 0, 1, 1], monkeypatch)
    assert all("epoch 2: links between hosts differ" in after.why for _, after in plans)
    crossed = [crossing(after.schedule, rank, 100_000) for rank, (_, after) in enumerate(plans)]
    assert crossed == [80_000, 20_000, 80_000, 20_000]


def crossing(schedule: Schedule | None, rank: int, count: int) -> int:
    """How many elements a rank sends to the other one of two hosts of two ranks."""
    assert schedule is not None
    sizes = schedule.sizes(count)
    return sum(
        sizes[chunk]
        for steps in schedule.rounds
        for step in steps
        if isinstance(step, Send) and step.peer // 2 != rank // 2
        for chunk in step.chunks
    )


def test_a_slow_link_between_hosts_is_gone_around(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_with({(0, 1): 0.1}, [0, 1, 2, 3], monkeypatch)
    for rank, (_, after) in enumerate(plans):
        assert after.algorithm == "hierarchical"
        assert after.schedule is not None
        peers = {step.peer for steps in after.schedule.rounds for step in steps}
        assert not peers & ({1} if rank == 0 else {0} if rank == 1 else set())


def test_survivors_agree() -> None:
    def rank(comm: pycomm.Communicator) -> Any:
        topology = quiet(comm)
        if comm.rank == 2:
            time.sleep(1.5)  # alive, and of no use to anybody
            topology._prober and topology._prober.close()
            comm.abort()
            return None
        with pytest.raises(pycomm.CommTimeoutError):
            comm.barrier(timeout=0.2)
        healthy = topology.group("healthy", timeout=0.3)
        assert healthy is not None
        total = healthy.all_reduce(np.array([comm.rank]))
        told = int(total[0]), healthy.size, topology.snapshot.lost, topology.groups("healthy")
        topology.close()
        comm.abort()
        return told

    told = pycomm.run_local(4, rank, hosts=[0, 0, 1, 1])
    assert told == [(4, 3, (2,), ((0, 1, 3),))] * 2 + [None] + told[:1]


def test_who_has_left_does_not_go_on() -> None:
    """A rank that told the others that it leaves is counted out by them, and must not count."""

    def rank(comm: pycomm.Communicator) -> str:
        topology = quiet(comm)
        try:
            if comm.rank < 2:
                # As Ctrl-C in a wait: peers are told, and MPI's work cannot be recalled.
                raise comm._engine.fail(KeyboardInterrupt(), "barrier", None)
            comm.barrier()
        except (KeyboardInterrupt, pycomm.CommError):
            pass
        try:
            left = topology.group("healthy", timeout=0.5)
        except pycomm.CommError as error:
            return str(error)
        finally:
            topology._prober and topology._prober.close()
        assert left is not None
        return str(left.all_gather_object(comm.rank))

    told = pycomm.run_local(4, rank)
    assert all("has told the others that it leaves" in one for one in told[:2])
    assert told[2:] == ["[2, 3]", "[2, 3]"]


def test_survivors_may_come_late() -> None:
    def rank(comm: pycomm.Communicator) -> Any:
        topology = quiet(comm)
        if comm.rank == 1:
            time.sleep(2.5)
            comm.abort()
            topology.close()
            return None
        with pytest.raises(pycomm.CommTimeoutError):
            comm.barrier(timeout=0.1)
        time.sleep(0.5 * comm.rank / 3)  # within the patience
        left = topology.group("healthy", timeout=0.8)
        assert left is not None
        there = left.all_gather_object(comm.rank)
        topology.close()
        comm.abort()
        return there

    told = pycomm.run_local(4, rank)
    assert told == [[0, 2, 3], None, [0, 2, 3], [0, 2, 3]]


def test_the_smaller_side_does_not_go_on() -> None:
    def rank(comm: pycomm.Communicator) -> str:
        topology = quiet(comm)
        if comm.rank > 0:
            time.sleep(1.0)
            topology._prober and topology._prober.close()
            comm.abort()
            return ""
        with pytest.raises(pycomm.CommTimeoutError):
            comm.barrier(timeout=0.2)
        with pytest.raises(pycomm.CommError, match="must not") as caught:
            topology.group("healthy", timeout=0.2)
        topology.close()
        comm.abort()
        return str(caught.value)

    assert "hears only [0] of 3 ranks" in pycomm.run_local(3, rank)[0]


@pytest.mark.parametrize(
    "answer",
    [
        5,
        Findings(5),  # type: ignore[arg-type]
        Findings(samples=5),  # type: ignore[arg-type]
        Findings(samples=(1,)),  # type: ignore[arg-type]
        Findings(samples=(Sample("a", "b", 0.0, None),)),  # type: ignore[arg-type]
        Findings(samples=(Sample("a", "b", float("nan"), State.UP),)),
        Findings(samples=(Sample("a", "b", 0.0, State.UP, counters=(("x", -1),)),)),
        Findings(samples=(Sample("a", "b", 0.0, State.UP, counters=5),)),  # type: ignore[arg-type]
        Findings(samples=(Sample("a", "b", 0.0, State.UP, rate=float("inf")),)),
        Findings(samples=(Sample("a", lambda: 0, 0.0, State.UP),)),  # type: ignore[arg-type]
    ],
)
def test_rubbish_from_a_probe_is_a_note(answer: Any) -> None:
    def rank(comm: pycomm.Communicator) -> str:
        with quiet(comm, lambda host, now: answer if comm.rank else Findings()) as topology:
            return topology.explain()

    told = pycomm.run_local(2, rank, hosts=[0, 1], timeout=10)
    assert told[0] == told[1]
    assert "the probe of this host failed" in told[0]


def test_a_rank_in_no_group_need_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager.Seat, "device_bus_id", lambda self: "0000:01:00.0")

    def rank(comm: pycomm.Communicator) -> Any:
        states = [State.UP, State.DOWN] if comm.rank == 2 else [State.UP]

        def probe(host: str, now: float) -> Findings:
            state = states.pop(0) if len(states) > 1 else states[0]
            one = Gpu("gpu0", host, 0, "0000:01:00.0")
            sample = Sample("gpu0", "nvml", now, state, "fell off the bus")
            return Findings(Topology(hosts=(Host(host),), gpus=(one,)), (sample,))

        with quiet(comm, probe) as topology:
            first, host = topology.group("healthy"), topology.group("host")
            assert first is not None
            topology.refresh()
            assert first.closed
            assert topology.group("host") is host
            after = topology.group("healthy") if comm.rank != 2 else None
            return None if after is None else after.size

    assert pycomm.run_local(3, rank, hosts=[0, 1, 2], timeout=10) == [2, 2, None]


def test_a_group_in_a_with_statement_is_made_again() -> None:
    def rank(comm: pycomm.Communicator) -> None:
        with quiet(comm) as topology:
            for _ in range(3):
                node = topology.group("host")
                assert node is not None
                with node:
                    node.barrier()

    pycomm.run_local(2, rank, timeout=10)


def test_a_listener_may_close_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "_ASKING", 1e9)

    def rank(comm: pycomm.Communicator) -> bool:
        options = {"interval": 1e-3, "overhead": 1.0, "measure": False}
        topology = TopologyManager(comm, probe=looks([State.UP, State.DOWN]), **options)
        closed = []
        topology.on_change(lambda before, after: closed.append(topology.close()))
        x = np.zeros(1)
        ends = time.monotonic() + 10
        while not closed and time.monotonic() < ends:
            comm.all_reduce(x)
        comm.barrier()
        return bool(closed)

    assert pycomm.run_local(2, rank, timeout=10) == [True, True]


def test_who_leaves_by_an_exception_tells_those_in_a_look() -> None:
    def rank(comm: pycomm.Communicator) -> str:
        if comm.rank == 0:
            with pytest.raises(KeyError), comm, quiet(comm):
                raise KeyError("x")
            return ""
        topology = quiet(comm)
        with pytest.raises(pycomm.PeerError) as caught:
            topology.refresh()
        topology.__exit__(None, caught.value, None)
        comm.abort()
        return str(caught.value)

    began = time.monotonic()
    assert "KeyError" in pycomm.run_local(2, rank, timeout=30)[1]
    assert time.monotonic() - began < 10


def test_a_probe_that_fails_is_a_note() -> None:
    def broken(host: str, now: float) -> Findings:
        raise OSError("no such luck")

    def rank(comm: pycomm.Communicator) -> str:
        with quiet(comm, broken) as topology:
            return topology.explain()

    assert "the probe of this host failed: OSError: no such luck" in pycomm.run_local(1, rank)[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttl": 0},
        {"ttl": "long"},
        {"interval": -1},
        {"good_probes": 0},
        {"good_probes": 1.5},
        {"overhead": 0},
        {"overhead": 2},
        {"overhead": True},
        {"probe": 5},
        {"measure": "no"},
        {"background": None},
    ],
)
def test_arguments_that_make_no_sense(wrong: dict[str, Any]) -> None:
    def rank(comm: pycomm.Communicator) -> None:
        with pytest.raises((ValueError, TypeError)):
            TopologyManager(comm, **wrong)
        comm.barrier()

    pycomm.run_local(2, rank)


def test_different_settings_are_refused_everywhere() -> None:
    def rank(comm: pycomm.Communicator) -> None:
        same = np.float32(0.5) if comm.rank else 0.5
        with quiet(comm, overhead=same, good_probes=np.int64(2) if comm.rank else 2):
            comm.barrier()
        with pytest.raises(pycomm.MismatchError, match=r"rank 0: .*interval=5.0.*rank 1: .*=6.0"):
            TopologyManager(comm, interval=5.0 + comm.rank)
        with quiet(comm):
            comm.barrier()

    pycomm.run_local(2, rank)


def test_the_thread_ends_with_the_communicator() -> None:
    def rank(comm: pycomm.Communicator) -> Any:
        probe = looks([State.UP])
        return TopologyManager(comm, interval=0.01, probe=probe, measure=False)._prober

    (prober,) = pycomm.run_local(1, rank)
    assert prober._thread is not None
    prober._thread.join(5)
    assert not prober._thread.is_alive()


def test_a_manager_that_is_left_by_an_exception_leaves_the_communicator() -> None:
    def rank(comm: pycomm.Communicator) -> None:
        with pytest.raises(KeyError), TopologyManager(comm, measure=False):
            raise KeyError
        comm.barrier()
        with quiet(comm) as topology:
            comm.barrier()
            assert topology.epoch == 1

    pycomm.run_local(2, rank, timeout=10)


def test_a_manager_that_cannot_begin_leaves_the_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank(comm: pycomm.Communicator) -> str:
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr(manager.Decider, "decide", lambda self, now: 1 / 0)
        comm.barrier()
        with pytest.raises(pycomm.CommError, match="ZeroDivisionError") as caught:
            TopologyManager(comm, interval=0.01, measure=False)
        comm.barrier()
        monkeypatch.undo()
        comm.barrier()
        with quiet(comm):
            comm.barrier()
        return str(caught.value)

    before = set(threading.enumerate())
    told = pycomm.run_local(2, rank, timeout=10)
    assert told[0] == told[1]
    time.sleep(0.05)
    left = set(threading.enumerate()) - before
    assert not [one for one in left if one.name == "pycomm topology"]


@pytest.mark.parametrize("key", [lambda rank: -rank, lambda rank: (5 * rank) % 4])
def test_hosts_by_identity_whatever_the_ranks_are(key: Callable[[int], int]) -> None:
    def rank(comm: pycomm.Communicator) -> Any:
        part = comm.split(0, key(comm.rank))
        assert part is not None
        with quiet(part) as topology:
            node = topology.group("host")
            assert node is not None
            here = sorted(node.all_gather_object(comm.rank))
            (leaders,) = topology.groups("leaders") or ((),)
            return here, node.broadcast_object(part.rank) in leaders

    for number, told in enumerate(pycomm.run_local(4, rank, hosts=[0, 1, 0, 1])):
        assert told == ([number % 2, number % 2 + 2], True)


def test_one_manager_at_a_time() -> None:
    def rank(comm: pycomm.Communicator) -> None:
        with TopologyManager(comm, measure=False) as topology:
            with pytest.raises(pycomm.ArgumentValueError, match="has a topology manager already"):
                TopologyManager(comm)
            with pytest.raises(pycomm.ArgumentValueError, match="no groups 'nvlinks'"):
                topology.group("nvlinks")
            with pytest.raises(pycomm.ArgumentValueError, match="unknown: no rank works on a GPU"):
                topology.group("nvlink")
            with pytest.raises(pycomm.ArgumentValueError, match="known: nvlink_local"):
                topology.get_group_by_tag("fast")
            with pytest.raises(pycomm.ArgumentTypeError):
                topology.on_change(None)  # type: ignore[arg-type]
        topology.close()
        with pytest.raises(pycomm.CommError, match="closed"):
            topology.refresh()
        with TopologyManager(comm, measure=False):
            comm.barrier()

    pycomm.run_local(2, rank)


def test_a_listener_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def rank(comm: pycomm.Communicator) -> int:
        with quiet(comm, looks([State.UP, State.DOWN])) as topology:
            topology.on_change(lambda before, after: 1 / 0)
            topology.refresh()
            return topology.epoch

    assert pycomm.run_local(1, rank) == [2]
    assert "ZeroDivisionError" in caplog.text

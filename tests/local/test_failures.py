"""Peers that are late, leave, or do something else; deadlines; states of a communicator."""

import _thread
import signal
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import (
    ArgumentTypeError,
    ArgumentValueError,
    CommError,
    CommTimeoutError,
    Communicator,
    MismatchError,
    PeerError,
)


def run_apart(size: int, function: Any, timeout: float = 300.0) -> list[Any]:
    """Run as `pycomm.run_local` does, where ranks end without meeting: each aborts at its end."""

    def run(comm: Communicator) -> Any:
        result = function(comm)
        comm.abort()
        return result

    return pycomm.run_local(size, run, timeout=timeout)


def outcome(function: Any, *args: Any, **arguments: Any) -> Any:
    """Return what a call gives, or the error it raises."""
    try:
        return function(*args, **arguments)
    except Exception as error:
        return error


def test_a_rank_that_does_not_come_is_named() -> None:
    def run(comm: Communicator) -> Any:
        comm.barrier()
        if comm.rank == 1:
            time.sleep(1.5)  # longer than deadline and roll call
            return None
        began = time.monotonic()
        error = outcome(comm.all_reduce, np.ones(3))
        assert time.monotonic() - began < 1.4
        return error

    errors = run_apart(3, run, timeout=0.3)
    for rank in (0, 2):
        error = errors[rank]
        assert type(error) is CommTimeoutError
        assert (error.operation, error.sequence, error.rank) == ("all_reduce", 1, rank)
        assert error.missing == (1,)
        assert error.timeout == 0.3
        assert "all_reduce #1" in str(error)
        assert "not heard from: rank 1" in str(error)


def test_a_rank_that_waits_for_something_else_is_told_apart() -> None:
    def run(comm: Communicator) -> Any:
        if comm.rank == 2:
            return outcome(comm.recv, np.empty(2), 0, timeout=5)
        return outcome(comm.all_reduce, np.ones(3), timeout=0.3)

    errors = run_apart(3, run)
    assert errors[0].missing == errors[1].missing == ()
    assert "rank 2 is at recv" in str(errors[0])
    assert isinstance(errors[2], CommTimeoutError)  # told that rank 0 has given up
    assert "rank 0 gave up" in str(errors[2])


def test_who_comes_late_is_told_at_once() -> None:
    def run(comm: Communicator) -> Any:
        if comm.rank == 0:
            time.sleep(1.2)
        began = time.monotonic()
        # Long enough for two rounds: rank 1 is gone when the second one is due.
        x = np.ones(1_000_000)
        error = outcome(comm.all_reduce, x, timeout=0.3 if comm.rank else 30)
        return error, time.monotonic() - began

    (late, seconds), (early, _) = run_apart(2, run)
    assert isinstance(early, CommTimeoutError)
    assert early.missing == (0,)
    assert isinstance(late, CommTimeoutError)
    assert "rank 1 gave up" in str(late)
    assert seconds < 2


def test_a_rank_that_raises_frees_the_others() -> None:
    def run(comm: Communicator) -> Any:
        if comm.rank == 1:
            raise KeyError("no such file")
        began = time.monotonic()
        with pytest.raises(PeerError, match="rank 1 left with KeyError: 'no such file'") as caught:
            comm.all_reduce(np.ones(3))
        assert time.monotonic() - began < 5
        assert caught.value.peers == (1,)
        raise caught.value

    with pytest.raises(KeyError) as caught:
        pycomm.run_local(4, run, timeout=60)
    assert any("rank 1 of 4" in note for note in caught.value.__notes__)


def test_a_broken_communicator_only_aborts() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(1)
            return
        with pytest.raises(CommTimeoutError):
            comm.barrier(timeout=0.2)
        with pytest.raises(CommError, match=r"broken since barrier #0.*only abort\(\)"):
            comm.all_reduce(np.ones(3))
        with pytest.raises(CommError, match="broken"):
            comm.send(np.ones(3), 1)
        comm.close()
        comm.abort()
        with pytest.raises(CommError, match="aborted"):
            comm.barrier()

    run_apart(2, run)


def test_close_is_idempotent_and_finishes_what_was_started() -> None:
    def run(comm: Communicator) -> float:
        work = comm.all_reduce(np.full(100_000, 1.0), async_op=True)
        comm.close()
        comm.close()
        with pytest.raises(CommError, match="closed"):
            comm.barrier()
        return float(work.wait()[-1])

    assert pycomm.run_local(3, run, timeout=20) == [3.0] * 3


def test_wrong_arguments_leave_the_communicator_usable() -> None:
    x = np.ones(6, np.float32)

    def run(comm: Communicator) -> None:
        frozen = x.copy()
        frozen.flags.writeable = False
        a = np.arange(16.0).reshape(4, 4)
        before = a.copy()
        for function, args, arguments, error, word in (
            (comm.all_reduce, (a[:, 0],), {}, ArgumentValueError, "strided"),
            (comm.all_reduce, (x, np.empty(12, np.float32)[::2]), {}, ArgumentValueError, "out is"),
            (comm.all_reduce, (np.asfortranarray(a[:2]),), {}, ArgumentValueError, "Fortran"),
            (comm.all_reduce, (frozen,), {}, ArgumentValueError, "read-only"),
            (comm.all_reduce, (x, frozen), {}, ArgumentValueError, "read-only"),
            (comm.all_reduce, (x, np.empty(5, np.float32)), {}, ArgumentValueError, "elements"),
            (comm.all_reduce, (x, np.empty(6)), {}, ArgumentTypeError, "float64"),
            (comm.all_reduce, (x.copy(),), {"op": "xor"}, ArgumentValueError, "xor"),
            (comm.all_reduce, (np.ones(2, bool),), {"op": "avg"}, ArgumentTypeError, "bool"),
            (comm.all_reduce, (x.copy(),), {"algorithm": "magic"}, ArgumentValueError, "magic"),
            (comm.all_reduce, (x.copy(),), {"algorithm": "native"}, ArgumentValueError, "native"),
            (comm.all_reduce, (x.copy(),), {"timeout": 0}, ArgumentValueError, "timeout"),
            (comm.all_reduce, ([1.0, 2.0],), {}, ArgumentTypeError, "list"),
            (comm.all_gather, (np.ones(4), np.ones(2)), {}, ArgumentValueError, r"\(x, out\)"),
            (comm.all_gather, (a[0], a.reshape(-1)[2:10]), {}, ArgumentValueError, "overlap"),
            (comm.reduce_scatter, (np.ones(3),), {}, ArgumentValueError, "evenly"),
            (comm.reduce_scatter, (np.ones(2), np.ones(4)), {}, ArgumentValueError, "order"),
            (comm.reduce_scatter, (np.array(1.0),), {}, ArgumentValueError, "axis"),
            (comm.all_to_all, (np.ones((3, 2)),), {}, ArgumentValueError, "axis 0"),
            (comm.all_to_all, (a, a[1:]), {}, ArgumentValueError, "elements"),
            (comm.broadcast, (x,), {"root": 2}, ArgumentValueError, "root=2"),
            (comm.broadcast, (x,), {"root": -1}, ArgumentValueError, "root=-1"),
            (comm.broadcast, (x,), {"root": "0"}, ArgumentTypeError, "root"),
            (comm.send, (x, 5), {}, ArgumentValueError, "dest=5"),
            (comm.send, (x, 0), {"tag": -1}, ArgumentValueError, "tag"),
            (comm.recv, (frozen, 0), {}, ArgumentValueError, "read-only"),
            (comm.send_recv, (x, x), {"dest": 0, "source": 0}, ArgumentValueError, "two arrays"),
            (comm.split, ("red",), {}, ArgumentTypeError, "color"),
            (comm.split_ranks, ([0, 0],), {}, ArgumentValueError, "distinct"),
            (comm.split_ranks, ([],), {}, ArgumentValueError, "empty"),
            (comm.split_ranks, ([7],), {}, ArgumentValueError, "ranks=7"),
            (comm.split_ranks, (5,), {}, ArgumentTypeError, "several"),
            (comm.all_reduce, (x.copy(),), {"algorithm": []}, ArgumentTypeError, "algorithm"),
            (comm.barrier, (), {"timeout": "1"}, ArgumentTypeError, "timeout"),
        ):
            with pytest.raises(error, match=word):
                function(*args, **arguments)
        assert (a == before).all()
        if comm.rank:
            with pytest.raises(ArgumentValueError, match="rank 0, the root"):
                comm.scatter(None)
        # One rank alone gets it wrong, corrects itself, and all go on.
        if comm.rank == 1:
            with pytest.raises(ArgumentValueError):
                comm.all_reduce(a[:, 0])
        assert comm.all_reduce(x.copy())[0] == 2

    pycomm.run_local(2, run, timeout=20)


def test_empty_on_one_rank_only_ends_in_an_error() -> None:
    def run(comm: Communicator) -> Any:
        return outcome(comm.all_reduce, np.ones(0 if comm.rank else 4), timeout=0.5)

    errors = run_apart(2, run)
    assert all(isinstance(error, CommError) for error in errors)


def test_message_of_another_size() -> None:
    def run(comm: Communicator) -> Any:
        if comm.rank == 0:
            return outcome(comm.send, np.ones(4), 1)
        return outcome(comm.recv, np.ones(3), 0)

    error = run_apart(2, run, timeout=5)[1]
    assert isinstance(error, MismatchError)
    assert "24 bytes" in str(error)
    assert "sends 32" in str(error)


def test_ctrl_c_in_a_wait_is_seen_within_a_second() -> None:
    threading.Timer(0.3, _thread.interrupt_main).start()
    comm = pycomm.init("local")
    with pytest.raises(KeyboardInterrupt):
        # Nobody sends this message.
        comm.recv(np.empty(1), 0, timeout=30)
    with pytest.raises(CommError, match="broken since recv ended with KeyboardInterrupt"):
        comm.barrier()
    comm.abort()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_leaves_no_locked_communicator() -> None:
    """After an interrupt a communicator is open or broken, and can be ended in either state."""
    for attempt in range(60):
        comm = pycomm.init("local")
        x = np.ones(4)
        previous = signal.signal(signal.SIGALRM, lambda *_: _thread.interrupt_main())
        try:
            # Again after a while: Python reports an exception that meets a finalizer, and goes on.
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.00003 * attempt, 0.2)
            while True:
                comm.all_reduce(x)
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert comm._engine.state in ("open", "broken")
        comm.close()
        assert comm._engine.state in ("closed", "aborted")


def test_ctrl_c_ends_the_threads_of_run_local() -> None:
    ended: list[Any] = []

    def run(comm: Communicator) -> None:
        try:
            comm.recv(np.empty(1), comm.rank, timeout=30)
        except BaseException as error:
            ended.append(error)

    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        pycomm.run_local(2, run)
    moment = time.monotonic() + 5
    while len(ended) < 2 and time.monotonic() < moment:
        time.sleep(0.01)
    assert len(ended) == 2


def test_a_communicator_serves_one_thread_at_a_time() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            waiting = threading.Thread(target=lambda: outcome(comm.recv, np.empty(1), 1))
            waiting.start()
            time.sleep(0.2)
            with pytest.raises(CommError, match="another thread"):
                comm.send(np.empty(1), 1)
            comm._engine.transport.notify(1, b'{"kind": "answers", "text": "go"}')
            waiting.join(5)
            assert not waiting.is_alive()
        else:
            time.sleep(0.4)
            comm.send(np.ones(1), 0)

    pycomm.run_local(2, run, timeout=10)


def test_dropping_an_open_communicator_warns() -> None:
    comm = pycomm.init("local")
    with pytest.warns(ResourceWarning, match="without close"):
        del comm
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm = pycomm.init("local")
        comm.close()
        del comm


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_that_are_none(size: int) -> None:
    with pytest.raises(ArgumentValueError):
        pycomm.run_local(size, lambda comm: None)


def test_unknown_method() -> None:
    with pytest.raises(ArgumentValueError, match="'mpi'"):
        pycomm.init("gloo")

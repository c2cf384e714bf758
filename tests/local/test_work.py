"""Operations in flight: handles, order, progress, await."""

import asyncio
import gc
import time
from typing import Any

import numpy as np
import pytest

import pycomm
from pycomm import CommError, CommTimeoutError, Communicator, Work


def test_handles_in_any_order() -> None:
    def run(comm: Communicator) -> None:
        arrays = [np.full(count, float(comm.rank)) for count in (1, 100, 50_000, 300_000)]
        works = [comm.all_reduce(x, async_op=True) for x in arrays]
        total = sum(range(comm.size))
        order = list(range(4)) if comm.rank % 2 else [3, 1, 0, 2]
        for index in order:
            assert works[index].wait() is arrays[index]
            assert (arrays[index] == total).all()
            assert works[index].done()
            assert works[index].exception() is None
        assert works[0].wait() is arrays[0]

    pycomm.run_local(4, run, timeout=20)


def test_a_wait_makes_progress_with_everything() -> None:
    """Rank 0 waits for the second operation first, rank 1 for the first one."""

    def run(comm: Communicator) -> None:
        x, y = np.ones(200_000), np.ones(200_000)
        first = comm.all_reduce(x, async_op=True)
        if comm.rank == 0:
            comm.barrier()
            first.wait()
        else:
            first.wait()
            comm.barrier()
        second = comm.all_reduce(y, async_op=True)
        comm.all_reduce(np.ones(1))
        assert second.wait()[0] == 2

    pycomm.run_local(2, run, timeout=20)


def test_every_operation_has_a_handle() -> None:
    def run(comm: Communicator) -> None:
        n, r = comm.size, comm.rank
        x = np.full(4, r)
        works: list[tuple[Work, Any]] = [
            (comm.all_reduce(x.copy(), async_op=True), np.full(4, 3)),
            (comm.reduce(x.copy(), root=1, async_op=True), np.full(4, 3) if r == 1 else None),
            (comm.reduce_scatter(np.repeat(x, n)[: 4 * n], async_op=True), np.full(4, 3)),
            (comm.all_gather(x, async_op=True), np.repeat(np.arange(n), 4)),
            (comm.all_to_all(np.arange(n) + 10 * r, async_op=True), np.arange(n) * 10 + r),
            (comm.broadcast(x.copy(), root=2, async_op=True), np.full(4, 2)),
            (comm.gather(x, async_op=True), np.repeat(np.arange(n), 4) if r == 0 else None),
            (
                comm.scatter(
                    np.arange(n) if r == 0 else None, np.empty(1, np.int64), async_op=True
                ),
                np.array([r]),
            ),
            (comm.barrier(async_op=True), None),
        ]
        for work, expected in reversed(works):
            assert isinstance(work, Work)
            result = work.wait()
            assert result is None if expected is None else np.array_equal(result, expected)
        sent = comm.send(x, (r + 1) % n, async_op=True)
        got = comm.recv(np.empty(4, np.int64), (r - 1) % n, async_op=True)
        assert (got.wait() == (r - 1) % n).all()
        assert sent.wait() is x

    pycomm.run_local(3, run, timeout=20)


def test_dropping_the_handle_is_safe() -> None:
    def run(comm: Communicator) -> float:
        for _ in range(20):
            comm.all_reduce(np.ones(50_000), async_op=True)
            gc.collect(0)
        return float(comm.all_reduce(np.ones(1))[0])

    assert pycomm.run_local(2, run, timeout=30) == [2.0, 2.0]


def test_await() -> None:
    def run(comm: Communicator) -> float:
        async def main() -> float:
            x, y = np.ones(100_000), np.full(10, 2.0)
            first = comm.all_reduce(x, async_op=True)
            second = comm.all_reduce(y, async_op=True)
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while ticks < 3:
                    ticks += 1
                    await asyncio.sleep(0)

            b, a, _ = await asyncio.gather(_result(second), _result(first), tick())
            return float(a[0] + b[0])

        return asyncio.run(main())

    assert pycomm.run_local(2, run, timeout=20) == [6.0, 6.0]


async def _result(work: Work) -> Any:
    return await work


def test_awaiting_a_missing_rank_ends_at_the_deadline() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 0:

            async def main() -> None:
                await comm.all_reduce(np.ones(3), async_op=True, timeout=0.3)

            with pytest.raises(CommTimeoutError, match="not heard from: rank 1"):
                asyncio.run(main())
        else:
            time.sleep(1)
        comm.abort()

    pycomm.run_local(2, run)


def test_all_handles_fail_with_the_communicator() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            works = [comm.all_reduce(np.ones(3), async_op=True) for _ in range(2)]
            assert not works[0].done()
            assert "running" in repr(works[0])
            with pytest.raises(CommTimeoutError):
                works[1].wait(timeout=0.2)
            with pytest.raises(CommTimeoutError):
                works[0].wait()
            assert works[0].done()
            assert isinstance(works[0].exception(), CommTimeoutError)
            assert "failed" in repr(works[0])
        else:
            time.sleep(1)
        comm.abort()

    pycomm.run_local(2, run)


def test_abort_fails_what_is_in_flight() -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            work = comm.recv(np.ones(3), 1, async_op=True)
            comm.abort()
            with pytest.raises(CommError, match="aborted"):
                work.wait()
        comm.abort()

    pycomm.run_local(2, run)

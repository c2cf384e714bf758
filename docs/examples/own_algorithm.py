"""An all_reduce of one's own: a ring on which every chunk takes the shorter way round.

    python docs/examples/own_algorithm.py

On the built-in ring chunks travel in one direction and need n-1 steps to pass all n ranks. Here the
contributions to a chunk come to its owner from both sides at once, which takes n/2 steps, and the
result leaves it to both sides. Each rank still talks to its two neighbours only.
"""

import numpy as np

import pycomm
from pycomm.algorithms import (
    Link,
    Model,
    Recv,
    Schedule,
    Send,
    algorithm_of,
    predict,
    register,
    simulate,
    verify,
)
from pycomm.algorithms.compose import mirrored


def two_way_ring(rank: int, size: int) -> Schedule:
    """Return what `rank` does: chunk i is reduced at rank i, and goes back the way it came."""
    before, after = (rank - 1) % size, (rank + 1) % size
    rounds: list[tuple[Send | Recv, ...]] = []
    for far in range(size // 2, 0, -1):  # how far from its owner a chunk is in this round
        down = (
            Send(before, ((rank - far) % size,)),
            Recv(after, ((after - far) % size,), reduce=True),
        )
        up = (
            Send(after, ((rank + far) % size,)),
            Recv(before, ((before + far) % size,), reduce=True),
        )
        # A rank that is opposite to the owner sends one way only: both would count it twice.
        rounds.append(down + up if 2 * far < size else down)
    to_owners = tuple(rounds)
    return Schedule("all_reduce", rank, size, size, to_owners + mirrored(to_owners))


def main() -> None:
    """Register the algorithm, prove it, try it, predict it, run it."""
    algorithm = register("all_reduce", "two_way_ring", two_way_ring)
    print(two_way_ring(0, 4))

    for size in range(1, 18):
        verify(algorithm.schedules(size))
    print("right for 1 to 17 ranks")

    inputs = [np.arange(5) + 10 * rank for rank in range(3)]
    print("simulated:", simulate(algorithm.schedules(3), inputs)[0])

    model = Model(Link(2e-6, 10e9), Link(20e-6, 1e9), reduce_bandwidth=10e9)
    for name in ("ring", "two_way_ring"):
        seconds = predict(algorithm_of("all_reduce", name).schedules(8), 1024, model)
        print(f"predicted for 1 KiB on 8 ranks, {name}: {seconds * 1e6:.1f} µs")

    def work(comm: pycomm.Communicator) -> list[int]:
        x = np.arange(5) + 10 * comm.rank
        return list(map(int, comm.all_reduce(x, algorithm="two_way_ring")))

    print("on 4 threads:", pycomm.run_local(4, work, timeout=30)[0])


if __name__ == "__main__":
    main()

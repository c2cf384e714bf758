"""Random collectives against NumPy, on ranks that share memory: as many cases as are asked for.

Run by ``scripts/fuzz``. Operation, dtype, op, count, root, algorithm, registered or not, in place
or not: all of it is drawn, the same on all ranks, and each rank checks what it gets.
"""

import argparse
import sys
import time

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.reference import cases, check_case

import pycomm


def main() -> int:
    """Run the cases and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    with pycomm.init("mpi", timeout=30) as comm:

        @seed(options.seed)
        @settings(
            max_examples=options.cases,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(data=st.data())
        def run(data: st.DataObject) -> None:
            check_case(comm, data.draw(cases(comm.size, shared=True)))

        run()
        if comm.rank == 0:
            seconds = time.monotonic() - start
            print(f"{options.cases} cases on {comm.size} ranks in {seconds:.0f} s, none wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())

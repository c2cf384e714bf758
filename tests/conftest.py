"""For all tests: a rank that is ended from outside says where it was.

`scripts/test` watches its ranks itself. This is for pytest started by hand, for instance by
``pycomm run -n 3 -m pytest --with-mpi tests/mpi``: when one rank dies or runs into the time limit
of a test, mpirun ends the others by SIGTERM, and their stacks tell what they waited for.
"""

import faulthandler
import os
import signal

import pytest

# What was measured on this machine has no say in tests, also not in the jobs that they start.
os.environ["PYCOMM_TUNING"] = "off"


def pytest_configure(config: pytest.Config) -> None:
    """Print the stacks of all threads on SIGTERM, then end as usual."""
    if "PYCOMM_TEST_FOLDER" not in os.environ:
        # Not sys.stderr, which captures the output of tests later on.
        stderr = os.fdopen(os.dup(2), "w")
        config.add_cleanup(stderr.close)
        config.add_cleanup(lambda: faulthandler.unregister(signal.SIGTERM))
        faulthandler.register(signal.SIGTERM, file=stderr, all_threads=True, chain=True)

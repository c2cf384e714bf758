"""The benchmark: nccl-tests' flags, columns and bandwidths for every collective of pycomm.

Run it as ``mpirun -n 4 python -m pycomm.bench all_reduce -b 8 -e 64M -f 4``. It stands on
pycomm as its users do: `pycomm`, and the tables `pycomm.dtypes` and `pycomm.errors`.
"""

from pycomm.bench.cli import main

__all__ = ["main"]

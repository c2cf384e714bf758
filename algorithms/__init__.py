"""Collective algorithms as data: pure functions of (rank, size) that return what one rank does.

Nothing here knows transports or clocks. `schedule` holds the records; `ring`, `recursive`,
`direct`, `bruck`, `tree` and `hierarchical` build schedules; `verify` proves them right for all
ranks together, `simulate` runs them on arrays, `predict` says how long they take; `register` adds
an algorithm of one's own.
"""

from pycomm.algorithms.cost import Link, Model, predict
from pycomm.algorithms.registry import Algorithm, algorithm_of, names, register, unregister
from pycomm.algorithms.schedule import COLLECTIVES, Recv, Schedule, Send
from pycomm.algorithms.simulate import simulate
from pycomm.algorithms.verify import verify

__all__ = [
    "COLLECTIVES",
    "Algorithm",
    "Link",
    "Model",
    "Recv",
    "Schedule",
    "Send",
    "algorithm_of",
    "names",
    "predict",
    "register",
    "simulate",
    "unregister",
    "verify",
]

"""Which algorithm a call takes: tables from sizes to names, built in or measured.

There is a table for each kind of memory and placement. It holds, for a collective, rules in the
order of sizes. A rule names algorithms in order of preference: the first that can do the call is
taken.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pycomm.errors import ArgumentValueError

__all__ = ["EVERYTHING", "Rule", "Table", "built_in", "preferences"]

#: The limit of a last rule.
EVERYTHING = 1 << 62


class Rule(NamedTuple):
    """For data of up to `limit` bytes, of all parts together: `names`, best first."""

    limit: int
    names: tuple[str, ...]


Table = Mapping[str, Sequence[Rule]]

_K, _M = 1 << 10, 1 << 20


def built_in(memory: str, size: int, hosts: int) -> Table:
    """Return the table for a kind of memory, ``"host"``, and `size` ranks on `hosts` hosts.

    Measured with Open MPI 5.0.11 and float32: 2 and 4 ranks on one host of 2 cores, and 2 ranks on
    each of 2 hosts with 1 Gbit/s between them.
    """
    if memory != "host":
        raise ArgumentValueError(f"there is no table for {memory} memory")
    if hosts > 1:
        return _several_hosts()
    at_once = 256 * _K if size == 2 else 16 * _K
    native = 128 * _K * size
    return {
        "all_reduce": (
            Rule(min(at_once, native), ("native", "one_shot")),
            Rule(native, ("native", "direct")),
            Rule(EVERYTHING, ("direct",)),
        ),
        "all_gather": (Rule(2 * _M, ("native", "direct")), Rule(EVERYTHING, ("direct",))),
        "reduce_scatter": (Rule(512 * _K, ("native", "direct")), Rule(EVERYTHING, ("direct",))),
        "broadcast": (Rule(EVERYTHING, ("native", "binomial")),),
        "reduce": (
            Rule(512 * _K, ("native", "direct")),
            Rule(EVERYTHING, ("direct",)),
        ),
        "all_to_all": (Rule(EVERYTHING, ("native", "direct")),),
        **_ONE_OF_OUR_OWN,
    }


_ONE_OF_OUR_OWN: dict[str, tuple[Rule, ...]] = {
    "barrier": (Rule(EVERYTHING, ("native", "dissemination")),),
    "gather": (Rule(EVERYTHING, ("native", "direct")),),
    "scatter": (Rule(EVERYTHING, ("native", "direct")),),
}


def _several_hosts() -> Table:
    return {
        "all_reduce": (
            Rule(32 * _K, ("recursive_doubling", "one_shot")),
            Rule(EVERYTHING, ("hierarchical", "direct")),
        ),
        "all_gather": (
            Rule(8 * _K, ("native", "direct")),
            Rule(EVERYTHING, ("hierarchical",)),
        ),
        "reduce_scatter": (
            Rule(8 * _K, ("direct",)),
            Rule(EVERYTHING, ("hierarchical", "direct")),
        ),
        "broadcast": (
            Rule(32 * _K, ("native", "binomial")),
            Rule(EVERYTHING, ("hierarchical",)),
        ),
        "reduce": (Rule(EVERYTHING, ("binomial", "direct")),),
        "all_to_all": (Rule(256 * _K, ("native", "direct")), Rule(EVERYTHING, ("direct",))),
        **_ONE_OF_OUR_OWN,
    }


def preferences(table: Table, collective: str, nbytes: int) -> tuple[str, ...]:
    """Return the algorithms for `nbytes` of data, best first."""
    return next(rule.names for rule in table[collective] if nbytes <= rule.limit)

"""Which algorithm a call takes: tables from sizes to names, built in or measured.

A table holds, for a collective, rules in the order of sizes. A rule names algorithms in order of
preference: the first that can do the call is taken.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["EVERYTHING", "Rule", "Table", "built_in", "preferences"]

#: The limit of a last rule.
EVERYTHING = 1 << 62


class Rule(NamedTuple):
    """For data of up to `limit` bytes, of all parts together: `names`, best first."""

    limit: int
    names: tuple[str, ...]


Table = Mapping[str, Sequence[Rule]]

_K, _M = 1 << 10, 1 << 20
_FIRST_NATIVE = {
    "all_gather": "direct",
    "all_to_all": "direct",
    "barrier": "dissemination",
    "broadcast": "binomial",
    "gather": "direct",
    "reduce": "direct",
    "reduce_scatter": "direct",
    "scatter": "direct",
}


def built_in(size: int, hosts: int) -> Table:
    """Return the table for `size` ranks on `hosts` hosts.

    Measured with Open MPI 5.0.11 on 2 cores; see docs/algorithms.md.
    """
    table: dict[str, tuple[Rule, ...]] = {
        collective: (Rule(EVERYTHING, ("native", own)),)
        for collective, own in _FIRST_NATIVE.items()
    }
    at_once = 512 * _K if size == 2 else 16 * _K
    native = 512 * _K if size == 2 else 512 * _K * size
    table["all_reduce"] = (
        Rule(min(at_once, native), ("native", "one_shot")),
        Rule(native, ("native", "direct")),
        Rule(EVERYTHING, ("direct",)),
    )
    if hosts > 1:
        long = Rule(EVERYTHING, ("hierarchical", "direct"))
        table["all_reduce"] = (Rule(16 * _K, ("native", "one_shot")), long)
        for collective, limit in (("all_gather", 64 * _K), ("reduce_scatter", 64 * _K)):
            table[collective] = (Rule(limit, ("native", "direct")), long)
    return table


def preferences(table: Table, collective: str, nbytes: int) -> tuple[str, ...]:
    """Return the algorithms for `nbytes` of data, best first."""
    return next(rule.names for rule in table[collective] if nbytes <= rule.limit)

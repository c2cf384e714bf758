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


def built_in(memory: str, hosts: int, *, crowded: bool = False) -> Table:
    """Return the table for a kind of memory, ``"host"``, and ranks on `hosts` hosts.

    `crowded` says whether a host has more ranks than cores. Measured with Open MPI 5.0.11 and
    float32: 2 ranks, and 4 crowded ones, on one host of 2 cores, and 2 ranks on each of 2 hosts
    with 1 Gbit/s between them. What is between and beyond goes by the nearest of these.
    """
    if memory != "host":
        raise ArgumentValueError(f"there is no table for {memory} memory")
    if hosts > 1:
        return _several_hosts()
    return _crowded_host() if crowded else _one_host()


def _one_host() -> Table:
    return {
        "all_reduce": (
            Rule(512, ("native", "shared", "one_shot")),
            Rule(256 * _K, ("shared", "native", "one_shot")),
            Rule(EVERYTHING, ("shared", "direct")),
        ),
        "reduce": (
            Rule(32 * _K, ("native", "shared", "direct")),
            Rule(EVERYTHING, ("shared", "direct")),
        ),
        "reduce_scatter": (
            Rule(_K, ("native", "shared", "direct")),
            Rule(512 * _K, ("shared", "native", "direct")),
            Rule(EVERYTHING, ("shared", "direct")),
        ),
        "all_gather": (Rule(EVERYTHING, ("shared", "native", "direct")),),
        "broadcast": (
            Rule(8 * _K, ("shared", "native", "binomial")),
            Rule(32 * _K, ("native", "binomial")),
            Rule(4 * _M, ("registered", "native", "binomial")),
            Rule(EVERYTHING, ("native", "binomial")),
        ),
        "gather": (
            Rule(32 * _K, ("shared", "native", "direct")),
            Rule(512 * _K, ("registered", "native", "direct")),
            Rule(EVERYTHING, ("shared", "native", "direct")),
        ),
        "scatter": (
            Rule(8 * _K, ("shared", "native", "direct")),
            Rule(32 * _K, ("native", "direct")),
            Rule(512 * _K, ("registered", "native", "direct")),
            Rule(EVERYTHING, ("shared", "native", "direct")),
        ),
        "all_to_all": (
            Rule(8 * _K, ("shared", "native", "direct")),
            Rule(32 * _K, ("native", "direct")),
            Rule(512 * _K, ("registered", "native", "direct")),
            Rule(8 * _M, ("native", "direct")),
            Rule(EVERYTHING, ("shared", "native", "direct")),
        ),
        "barrier": (Rule(EVERYTHING, ("native", "dissemination")),),
    }


def _crowded_host() -> Table:
    return {
        "all_reduce": (
            Rule(2 * _K, ("native", "shared", "one_shot")),
            Rule(32 * _K, ("native", "shared", "direct")),
            Rule(EVERYTHING, ("shared", "direct")),
        ),
        "reduce": (
            Rule(512 * _K, ("shared", "native", "direct")),
            Rule(EVERYTHING, ("shared", "direct")),
        ),
        "reduce_scatter": (
            Rule(64 * _K, ("native", "shared", "direct")),
            Rule(192 * _K, ("registered", "native", "direct")),
            Rule(EVERYTHING, ("shared", "direct")),
        ),
        "all_gather": (
            Rule(384 * _K, ("shared", "native", "direct")),
            Rule(3 * _M, ("registered", "native", "direct")),
            Rule(EVERYTHING, ("shared", "native", "direct")),
        ),
        "broadcast": (
            Rule(512, ("native", "binomial")),
            Rule(8 * _K, ("shared", "native", "binomial")),
            Rule(EVERYTHING, ("native", "binomial")),
        ),
        "gather": (
            Rule(2 * _K, ("native", "direct")),
            Rule(32 * _K, ("shared", "native", "direct")),
            Rule(512 * _K, ("native", "direct")),
            Rule(EVERYTHING, ("shared", "native", "direct")),
        ),
        "scatter": (
            Rule(2 * _K, ("native", "direct")),
            Rule(8 * _K, ("shared", "native", "direct")),
            Rule(8 * _M, ("native", "direct")),
            Rule(EVERYTHING, ("shared", "native", "direct")),
        ),
        "all_to_all": (
            Rule(96 * _K, ("shared", "native", "direct")),
            Rule(768 * _K, ("registered", "native", "direct")),
            Rule(8 * _M, ("native", "direct")),
            Rule(EVERYTHING, ("shared", "native", "direct")),
        ),
        "barrier": (Rule(EVERYTHING, ("native", "dissemination")),),
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
        "barrier": (Rule(EVERYTHING, ("native", "dissemination")),),
        "gather": (Rule(EVERYTHING, ("native", "direct")),),
        "scatter": (Rule(EVERYTHING, ("native", "direct")),),
    }


def preferences(table: Table, collective: str, nbytes: int) -> tuple[str, ...]:
    """Return the algorithms for `nbytes` of data, best first."""
    return next(rule.names for rule in table[collective] if nbytes <= rule.limit)

"""Checked mode: the ranks compare what they are about to do."""

import os
from typing import Any

import numpy as np

from pycomm.collectives import Exchange, Steps
from pycomm.errors import CommError, MismatchError

__all__ = ["as_check", "compare"]

_TEXT = 96  # bytes for the texts of a call, which are short names


def as_check(check: bool | None) -> bool:
    """Return whether calls are compared across ranks; None asks ``PYCOMM_CHECK``."""
    if check is None:
        return os.environ.get("PYCOMM_CHECK", "0").strip().lower() not in ("", "0", "false", "no")
    return bool(check)


def compare(exchange: Exchange, facts: dict[str, Any], verdict: list[CommError]) -> Steps:
    """Gather every rank's `facts`; where they differ, put the same error in `verdict` everywhere.

    Parameters
    ----------
    exchange : Exchange
        The road.
    facts : dict
        Texts and integers, under the same keys on every rank.
    verdict : list
        Receives one `MismatchError` if the ranks differ.
    """
    texts = [key for key, value in facts.items() if isinstance(value, str)]
    numbers = [key for key in facts if key not in texts]
    length = _TEXT + 8 * len(numbers)
    records = exchange.scratch(exchange.size * length, np.dtype(np.uint8))
    records = records.reshape(exchange.size, length)
    own = records[exchange.rank]
    text = "\0".join(facts[key] for key in texts).encode()[:_TEXT]
    own[:_TEXT] = np.frombuffer(text.ljust(_TEXT, b"\0"), np.uint8)
    own[_TEXT:] = np.array([facts[key] for key in numbers], np.int64).view(np.uint8)
    yield exchange.post(
        [(peer, own) for peer in exchange.others],
        [(peer, records[peer]) for peer in exchange.others],
    )
    if (records == records[0]).all():
        return
    calls: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        values = bytes(record[:_TEXT]).decode(errors="replace").split("\0")
        told: dict[str, Any] = dict(zip(texts, values, strict=False))
        told.update(zip(numbers, record[_TEXT:].copy().view(np.int64).tolist(), strict=True))
        calls.setdefault(_spelled(told), []).append(rank)
    listed = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {call}"
        for call, ranks in calls.items()
    )
    verdict.append(MismatchError(f"the ranks disagree about a call, nothing was sent: {listed}"))


def _spelled(told: dict[str, Any]) -> str:
    parts = [f"{told['count']} x {told['dtype']}"]
    if told["op"]:
        parts.append(f"op={told['op']}")
    if told["root"] >= 0:
        parts.append(f"root={told['root']}")
    if told["algorithm"] != "auto":
        parts.append(f"algorithm={told['algorithm']}")
    return f"{told['operation']} #{told['sequence']} ({', '.join(parts)})"

"""What each collective must give, in NumPy, from the inputs of all ranks."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from pycomm import Communicator, premul_sum
from pycomm.algorithms import algorithm_of, names
from pycomm.algorithms.registry import SHARED
from pycomm.dtypes import DTYPES, DType, Kind, ReduceOp, check_op

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
MOVING = ("all_gather", "all_to_all", "broadcast", "gather", "scatter")


def same_on_all(examples: int) -> settings:
    """Return settings under which all ranks run the same examples, whatever happens."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # no shrinking
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Example:
    """One collective with its arguments; `shape` is that of a rank's part."""

    collective: str
    dtype: str
    op: str
    shape: tuple[int, ...]
    root: int
    in_place: bool  # on even ranks
    alike: bool  # whether odd ranks do as even ones, or the opposite
    algorithm: str
    seed: int
    registered: str = "no"  # which arrays are in registered memory: of even ranks, outputs, ...


def allowed(op: str, dtype: DType) -> bool:
    """Whether `op` is defined for `dtype`."""
    try:
        check_op(premul_sum(1) if op == "premul_sum" else ReduceOp(op), dtype)
    except TypeError:
        return False
    return True


def usable(collective: str, dtype: str, op: str) -> list[str]:
    """Return the names of the algorithms that can do a collective."""
    averages_ints = op == "avg" and DTYPES[dtype].kind is Kind.INT
    return [
        name
        for name in names(collective)
        if not averages_ints or algorithm_of(collective, name).rounds_once
    ]


@st.composite
def cases(draw: st.DrawFn, size: int, *, shared: bool = False) -> Example:
    """Draw a case for `size` ranks; parts have up to a few hundred elements.

    `shared`: the ranks share memory; registered arrays and some thousands of elements, too.
    """
    collective = draw(st.sampled_from(REDUCING + MOVING))
    names = list(DTYPES)
    if collective in REDUCING:
        names = [name for name in names if DTYPES[name].kind is not Kind.OPAQUE]
    dtype = draw(st.sampled_from(names))
    ops = [op for op in (*ReduceOp, "premul_sum") if allowed(op, DTYPES[dtype])] or ["sum"]
    op = str(draw(st.sampled_from(ops)))
    algorithms = ("auto", "auto", *usable(collective, dtype, op), *SHARED * 2 * shared)
    shape = draw(
        st.one_of(
            st.tuples(st.integers(0, 5)),
            st.tuples(st.integers(0, 700)),
            st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 5)),
            *[st.tuples(st.integers(700, 40_000))] * shared,
        )
    )
    return Example(
        collective,
        dtype,
        op,
        shape,
        draw(st.integers(0, size - 1)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(algorithms)),
        draw(st.integers(0, 2**16)),
        draw(st.sampled_from(("no", "all", "even", "inputs", "outputs"))) if shared else "no",
    )


def data(case: Example, rank: int, parts: int) -> np.ndarray[Any, Any]:
    """Return the input of `rank`: small numbers, whose sums and products are exact everywhere."""
    shape = (case.shape[0] * parts, *case.shape[1:])
    generator = np.random.default_rng([case.seed, rank])
    dtype = DTYPES[case.dtype]
    if dtype.kind is Kind.OPAQUE:
        return generator.integers(0, 256, shape, np.uint8).view(dtype.numpy)
    low = 0 if dtype.numpy.kind in "ub" else -4
    values = generator.integers(low, 5, shape)
    if case.op == "prod":
        values = generator.choice([1, 1, 2, -1] if low else [1, 1, 2], shape)
    if dtype.kind is Kind.COMPLEX:
        return (values + 1j * generator.integers(-4, 5, shape)).astype(dtype.numpy)
    return values.astype(dtype.numpy)


def factor(case: Example, rank: int) -> int:
    """Return the factor of `rank` for premul_sum."""
    return 1 + (case.seed + rank) % 2


def reduced(case: Example, inputs: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the reduction of `inputs`, in the dtype of the case."""
    dtype = DTYPES[case.dtype]
    stack = np.stack(inputs)
    if dtype.kind is Kind.BOOL:
        any_of = case.op in ("sum", "max")
        return stack.any(axis=0) if any_of else stack.all(axis=0)
    wide = stack.astype(
        np.complex128 if dtype.kind is Kind.COMPLEX else object if dtype.kind is Kind.INT else "f8"
    )
    if case.op == "premul_sum":
        wide = np.stack([row * factor(case, rank) for rank, row in enumerate(wide)])
    if case.op == "min":
        return wide.min(axis=0).astype(dtype.numpy)
    if case.op == "max":
        return wide.max(axis=0).astype(dtype.numpy)
    if case.op == "prod":
        return wide.prod(axis=0).astype(dtype.numpy)
    total = wide.sum(axis=0)
    if case.op == "avg":
        return average(total, len(inputs), dtype)
    return total.astype(dtype.numpy)


def average(total: np.ndarray[Any, Any], ranks: int, dtype: DType) -> np.ndarray[Any, Any]:
    """Return exact sums divided: integers toward zero, others rounded to the dtype."""
    if dtype.kind is Kind.INT:
        quotients = [abs(v) // ranks * (1 if v >= 0 else -1) for v in total.ravel().tolist()]
        return np.array(quotients, dtype.numpy).reshape(total.shape)
    if dtype.kind is Kind.HALF:
        return (total.astype(np.float32) / np.float32(ranks)).astype(dtype.numpy)
    return (total.astype(dtype.numpy) / ranks).astype(dtype.numpy)


def moved_of(
    collective: str, inputs: list[np.ndarray[Any, Any]], rank: int, root: int
) -> np.ndarray[Any, Any] | None:
    """Return what `rank` gets from one-dimensional inputs, sums where the collective reduces."""
    size = len(inputs)
    if collective in ("all_reduce", "reduce"):
        return np.sum(inputs, axis=0) if root in (-1, rank) else None
    if collective in ("all_gather", "gather"):
        return np.concatenate(inputs) if root in (-1, rank) else None
    if collective == "broadcast":
        return inputs[root]
    if collective == "scatter":
        return np.split(inputs[root], size)[rank]
    parts = [np.split(one, size)[rank] for one in inputs]
    return np.sum(parts, axis=0) if collective == "reduce_scatter" else np.concatenate(parts)


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays have the same shape, dtype and values; zeros may differ in sign."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.itemsize == 1 and a.dtype.kind not in "iub":  # float8: bytes that were moved
        return np.array_equal(a.view(np.uint8), b.view(np.uint8))
    return bool((a == b).all())


def empty(comm: Communicator, case: Example, like: np.ndarray[Any, Any], *, output: bool) -> Any:
    """Return an array like another one, registered where the case says so."""
    names = ("all", "outputs" if output else "inputs", *("even",) * (comm.rank % 2 == 0))
    if case.registered in names:
        return comm.empty(like.shape, like.dtype)
    return np.empty_like(like)


def check_case(comm: Communicator, case: Example) -> None:
    """Run the case on this rank and compare with NumPy, output and untouched input."""
    size, rank = comm.size, comm.rank
    if rank % 2 and not case.alike:
        case = replace(case, in_place=not case.in_place)
    divided = case.collective in ("reduce_scatter", "all_to_all", "scatter")
    inputs = [data(case, peer, size if divided else 1) for peer in range(size)]
    x = empty(comm, case, inputs[rank], output=False)
    x[...] = inputs[rank]
    result, expected, untouched = _run(comm, case, inputs, x)
    half = case.op == "avg" and DTYPES[case.dtype].kind is Kind.HALF
    if expected is None:
        assert result is None
    elif half and case.algorithm not in ("direct", "one_shot", *SHARED):
        # Divided before it is added: each of so many roundings is of at most half a unit.
        found, unit = np.asarray(result), 2.0 ** (-10 if case.dtype == "float16" else -7)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(
            found.astype(float), expected.astype(float), rtol=0, atol=4 * size * unit
        )
    else:
        assert same_bits(np.asarray(result), expected), (case, rank, result, expected)
    if untouched:
        assert same_bits(x, inputs[rank]), (case, rank, "input was changed")


def _run(
    comm: Communicator, case: Example, inputs: list[np.ndarray[Any, Any]], x: np.ndarray[Any, Any]
) -> tuple[Any, np.ndarray[Any, Any] | None, bool]:
    """Return what the call gave, what it should give, and whether x must be as before."""
    size, rank, root = comm.size, comm.rank, case.root
    algorithm: dict[str, Any] = {"algorithm": case.algorithm}
    op = premul_sum(factor(case, rank)) if case.op == "premul_sum" else case.op
    at_root = rank == root
    part = case.shape[0]
    mine = slice(rank * part, (rank + 1) * part)
    if case.collective == "all_reduce":
        out = None if case.in_place else empty(comm, case, x, output=True)
        result = comm.all_reduce(x, out, op=op, **algorithm)
        assert result is (x if out is None else out)
        return result, reduced(case, inputs), not case.in_place
    if case.collective == "reduce":
        out = None if case.in_place or not at_root else empty(comm, case, x, output=True)
        result = comm.reduce(x, out, op=op, root=root, **algorithm)
        expected = reduced(case, inputs) if at_root else None
        return result, expected, not (case.in_place and at_root)
    if case.collective == "reduce_scatter":
        out = x[mine] if case.in_place else empty(comm, case, x[mine], output=True)
        result = comm.reduce_scatter(x, out, op=op, **algorithm)
        return result, reduced(case, inputs)[mine], not case.in_place
    if case.collective == "all_gather":
        out = None
        if case.in_place:
            whole = np.zeros((size * part, *x.shape[1:]), x.dtype)
            out = empty(comm, case, whole, output=True)
            out[mine] = x
            x = out[mine]
        return comm.all_gather(x, out, **algorithm), np.concatenate(inputs), True
    if case.collective == "all_to_all":
        out = x if case.in_place else empty(comm, case, x, output=True)
        result = comm.all_to_all(x, out, **algorithm)
        return result, np.concatenate([given[mine] for given in inputs]), not case.in_place
    if case.collective == "broadcast":
        out = None if case.in_place else empty(comm, case, x, output=True)
        given = x if case.in_place or at_root else None
        result = comm.broadcast(given, out, root=root, **algorithm)
        return result, inputs[root], not case.in_place
    if case.collective == "gather":
        out = None
        if case.in_place and at_root:
            whole = np.zeros((size * part, *x.shape[1:]), x.dtype)
            out = empty(comm, case, whole, output=True)
            out[mine] = x
            x = out[mine]
        result = comm.gather(x, out, root=root, **algorithm)
        return result, np.concatenate(inputs) if at_root else None, True
    assert case.collective == "scatter"
    out = empty(comm, case, inputs[root][mine], output=True)
    if at_root:
        out = x[mine] if case.in_place else out
    result = comm.scatter(x if at_root else None, out, root=root, **algorithm)
    return result, inputs[root][mine], not (case.in_place and at_root)

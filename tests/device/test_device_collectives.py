"""Every collective on device arrays, against NumPy: all dtypes, algorithms, places and kinds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.gpu import Interfaced, Packed
from support.reference import Example, cases, data, factor, reduced, same_bits, same_on_all

from pycomm import Communicator, premul_sum
from pycomm.dtypes import DTYPES, Kind
from pycomm.streams import LEGACY, Stream

pytestmark = pytest.mark.mpi

KINDS = ("interface", "dlpack")


def on_device(comm: Communicator, kind: str, values: np.ndarray, stream: int) -> Any:
    device = comm.local_rank
    return Packed(values, device) if kind == "dlpack" else Interfaced(values, device, stream)


def close(case: Example, found: np.ndarray, expected: np.ndarray, size: int) -> bool:
    """Whether a result is right: exactly, but for averages of floats, which NCCL rounds twice."""
    row = DTYPES[case.dtype]
    if case.op != "avg" or row.kind is Kind.INT:
        return same_bits(found, expected)
    unit = 2.0 ** {"float16": -10, "bfloat16": -7, "float32": -23, "complex64": -23}.get(
        case.dtype, -52
    )
    wide = np.complex128 if row.kind is Kind.COMPLEX else np.float64
    return found.shape == expected.shape and np.allclose(
        found.astype(wide), expected.astype(wide), rtol=0, atol=4 * 4 * size * unit
    )


def check(comm: Communicator, case: Example, kind: str, stream: int) -> None:
    size, rank, root = comm.size, comm.rank, case.root
    if rank % 2 and not case.alike:
        case = replace(case, in_place=not case.in_place)
    divided = case.collective in ("reduce_scatter", "all_to_all", "scatter")
    inputs = [data(case, peer, size if divided else 1) for peer in range(size)]
    x = on_device(comm, kind, inputs[rank], stream)
    part = case.shape[0]
    mine = slice(rank * part, (rank + 1) * part)
    at_root = rank == root
    options: dict[str, Any] = {"algorithm": case.algorithm}
    if case.collective in ("all_reduce", "reduce", "reduce_scatter"):
        options["op"] = premul_sum(factor(case, rank)) if case.op == "premul_sum" else case.op
    if case.collective in ("reduce", "broadcast", "gather", "scatter"):
        options["root"] = root

    def like(values: np.ndarray) -> Any:
        return on_device(comm, kind, np.zeros_like(values), stream)

    out, expected = None, None
    if case.collective == "all_reduce":
        out, expected = None if case.in_place else like(inputs[rank]), reduced(case, inputs)
    elif case.collective == "reduce":
        out = None if case.in_place or not at_root else like(inputs[rank])
        expected = reduced(case, inputs) if at_root else None
    elif case.collective == "reduce_scatter":
        out = x[mine] if case.in_place else like(inputs[rank][mine])
        expected = reduced(case, inputs)[mine]
    elif case.collective in ("all_gather", "gather"):
        whole = np.zeros((size * part, *inputs[rank].shape[1:]), inputs[rank].dtype)
        if case.collective == "all_gather" or at_root:
            expected = np.concatenate(inputs)
            if case.in_place:
                whole[mine] = inputs[rank]
                out = on_device(comm, kind, whole, stream)
                x = out[mine]
            else:
                out = like(whole)
    elif case.collective == "all_to_all":
        out = x if case.in_place else like(inputs[rank])
        expected = np.concatenate([given[mine] for given in inputs])
    elif case.collective == "broadcast":
        out = None if case.in_place else like(inputs[rank])
        expected = inputs[root]
        if out is not None and not at_root:
            x = None
    else:
        expected = inputs[root][mine]
        out = (x[mine] if case.in_place else like(expected)) if at_root else like(expected)
        x = x if at_root else None
    result = getattr(comm, case.collective)(x, out, **options)
    if expected is None:
        assert result is None
        return
    assert result is (x if out is None else out)
    found = result.numpy()
    assert close(case, found, expected, size), (case, rank, found, expected)
    if out is not None and x is not None and not case.in_place:
        assert same_bits(x.numpy(), inputs[rank]), (case, rank, "input was changed")


@pytest.mark.parametrize("kind", KINDS)
def test_collectives(comm: Communicator, together: Callable[..., None], kind: str) -> None:
    own = Stream(comm.local_rank)
    stream = LEGACY if kind == "dlpack" else own.handle

    def run(comm: Communicator) -> None:
        @same_on_all(400)
        @given(cases(comm.size))
        def body(case: Example) -> None:
            check(comm, case, kind, stream)

        body()

    together(run)

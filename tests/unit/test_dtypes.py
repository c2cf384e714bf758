"""The tables of element types and reduce operations."""

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pycomm import ArgumentTypeError, ArgumentValueError, ReduceOp, premul_sum
from pycomm.dtypes import DTYPES, as_dtype, as_op, check_op

NATIVE, FOREIGN = ("<", ">") if sys.byteorder == "little" else (">", "<")

REAL = {"sum", "prod", "min", "max", "avg"}
ALLOWED = {
    "bool": {"sum", "prod", "min", "max"},
    **{f"{sign}int{bits}": REAL for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), REAL),
    **{key: {"sum", "avg"} for key in ("complex64", "complex128")},
    **{key: set() for key in ("float8_e4m3", "float8_e5m2")},
}


def test_the_table_is_complete() -> None:
    assert set(DTYPES) == set(ALLOWED)
    for name, row in DTYPES.items():
        assert row.name == name
        assert row.itemsize == row.numpy.itemsize
        assert as_dtype(row.numpy) is as_dtype(name) is as_dtype(row) is row


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("op", ReduceOp)
def test_every_op_on_every_dtype(name: str, op: ReduceOp) -> None:
    if op in ALLOWED[name]:
        check_op(op, DTYPES[name])
    else:
        with pytest.raises(ArgumentTypeError, match=name):
            check_op(op, DTYPES[name])


@pytest.mark.parametrize("spelling", ["f4", f"{NATIVE}f4", "=f4", "float32", np.float32, "single"])
def test_native_spellings(spelling: Any) -> None:
    assert as_dtype(spelling) is DTYPES["float32"]


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (f"{FOREIGN}f4", "byte order"),
        (f"{FOREIGN}i8", "byte order"),
        (np.dtype([("a", "f4"), ("b", "i4")]), "structured"),
        (object, "object"),
        ("U3", "not supported"),
        ("S3", "not supported"),
        ("M8[s]", "not supported"),
        ("V4", "not supported"),
        (np.longdouble, "not supported"),
        (ml_dtypes.float8_e4m3, "not supported"),
        ("no such type", "not a dtype"),
    ],
)
def test_refused_by_name(dtype: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        as_dtype(dtype)


@pytest.mark.parametrize(
    ("spelling", "op"),
    [
        ("sum", ReduceOp.SUM),
        ("SUM", ReduceOp.SUM),
        ("product", ReduceOp.PROD),
        ("PROD", ReduceOp.PROD),
        ("mean", ReduceOp.AVG),
        (ReduceOp.MAX, ReduceOp.MAX),
    ],
)
def test_op_spellings(spelling: Any, op: ReduceOp) -> None:
    assert as_op(spelling) is op


@pytest.mark.parametrize("op", ["Sum", "xor", "", None, 3, ["sum"], np.add])
def test_unknown_ops(op: Any) -> None:
    with pytest.raises(ArgumentValueError, match="known: 'sum'"):
        as_op(op)


def test_premul_sum_factors() -> None:
    assert as_op(premul_sum(np.float32(0.5))) == premul_sum(0.5)
    for factor in (True, "2", None, np.array([1.0])):
        with pytest.raises(ArgumentTypeError):
            premul_sum(factor)  # type: ignore[arg-type]
    check_op(premul_sum(0.5), DTYPES["float16"])
    check_op(premul_sum(1j), DTYPES["complex64"])
    check_op(premul_sum(-3), DTYPES["int8"])
    for factor, name, error in (
        (1j, "float32", ArgumentTypeError),
        (2, "bool", ArgumentTypeError),
        (2, "float8_e5m2", ArgumentTypeError),
        (0.5, "int32", ArgumentValueError),
        (300, "int8", ArgumentValueError),
        (-1, "uint8", ArgumentValueError),
        (10**400, "float32", ArgumentValueError),
        (10**400, "complex64", ArgumentValueError),
    ):
        with pytest.raises(error):
            check_op(premul_sum(factor), DTYPES[name])

"""One table of element types and one of reduce operations; everybody else looks things up here."""

import enum
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pycomm.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "BY_NUMPY",
    "DTYPES",
    "DType",
    "Kind",
    "PremulSum",
    "ReduceOp",
    "as_dtype",
    "as_op",
    "check_op",
    "premul_sum",
]


class Kind(enum.Enum):
    """What arithmetic an element type allows."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    HALF = "half"
    COMPLEX = "complex"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One row of the table of element types.

    Attributes
    ----------
    name : str
        The name used in messages and on the command line.
    numpy : numpy.dtype
        The NumPy (or ml_dtypes) dtype.
    itemsize : int
        Bytes an element.
    kind : Kind
        Which reduce operations make sense.
    mpi : str or None
        Name of the MPI datatype whose arithmetic is right and fast in every MPI, None where there
        is none: MPI has no bfloat16, the float16 sum of Open MPI and MPICH is 10 to 17 times
        slower than float32, and Open MPI's AVX kernels saturate sums of 8- and 16-bit integers
        (5.0.11; 127 + 127 is 127 in some elements of an array and -2 in others).
    nccl : int or None
        Its ncclDataType_t, None where NCCL has none.
    nccl_since : tuple of int
        The first version of NCCL that has it.
    """

    name: str
    numpy: np.dtype[Any]
    itemsize: int
    kind: Kind
    mpi: str | None = None
    nccl: int | None = None
    nccl_since: tuple[int, int] = (2, 0)

    def __repr__(self) -> str:
        return self.name


# ncclDataType_t, and the versions of what came later (nccl.h, and the release notes).
_NCCL = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6,
    "float32": 7, "float64": 8, "bfloat16": 9, "float8_e4m3": 10, "float8_e5m2": 11,
}  # fmt: skip
_NCCL_SINCE = {"bfloat16": (2, 10), "float8_e4m3": (2, 24), "float8_e5m2": (2, 24)}


def _row(scalar: Any, kind: Kind, mpi: str | None = None, name: str | None = None) -> DType:
    dtype = np.dtype(scalar)
    name = name or dtype.name
    since = _NCCL_SINCE.get(name, (2, 0))
    return DType(name, dtype, dtype.itemsize, kind, mpi, _NCCL.get(name), since)


DTYPES: dict[str, DType] = {
    row.name: row
    for row in (
        _row(np.bool_, Kind.BOOL),
        _row(np.int8, Kind.INT),
        _row(np.uint8, Kind.INT),
        _row(np.int16, Kind.INT),
        _row(np.uint16, Kind.INT),
        _row(np.int32, Kind.INT, "INT32_T"),
        _row(np.uint32, Kind.INT, "UINT32_T"),
        _row(np.int64, Kind.INT, "INT64_T"),
        _row(np.uint64, Kind.INT, "UINT64_T"),
        _row(np.float16, Kind.HALF),
        _row(ml_dtypes.bfloat16, Kind.HALF),
        _row(np.float32, Kind.FLOAT, "FLOAT"),
        _row(np.float64, Kind.FLOAT, "DOUBLE"),
        _row(np.complex64, Kind.COMPLEX, "C_FLOAT_COMPLEX"),
        _row(np.complex128, Kind.COMPLEX, "C_DOUBLE_COMPLEX"),
        _row(ml_dtypes.float8_e4m3fn, Kind.OPAQUE, name="float8_e4m3"),
        _row(ml_dtypes.float8_e5m2, Kind.OPAQUE),
    )
}

#: The rows by NumPy dtype, which is what every call looks up.
BY_NUMPY: dict[np.dtype[Any], DType] = {row.numpy: row for row in DTYPES.values()}


def as_dtype(dtype: Any) -> DType:
    """Return the table's row for `dtype`.

    Parameters
    ----------
    dtype : DType, str, numpy.dtype or scalar type
        A row, its name, or anything `numpy.dtype` understands. Native spellings of the byte order
        (``"<f4"`` and ``"=f4"`` on a little-endian machine) are the native dtype.

    Raises
    ------
    ArgumentTypeError
        For a dtype that is not in the table: foreign byte order, structured, object, text, dates.
    """
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    try:
        resolved = dtype if isinstance(dtype, np.dtype) else np.dtype(dtype)
    except TypeError as error:
        raise ArgumentTypeError(f"{dtype!r} is not a dtype: {error}") from None
    row = BY_NUMPY.get(resolved)
    if row is not None:
        return row
    if not resolved.isnative:
        raise ArgumentTypeError(
            f"dtype {resolved.str!r} has the byte order of another machine; "
            "convert with x.astype(x.dtype.newbyteorder('='))"
        )
    if resolved.fields is not None:
        raise ArgumentTypeError(f"structured dtype {resolved} is not supported; send its fields")
    raise ArgumentTypeError(f"dtype {resolved} is not supported; supported: {', '.join(DTYPES)}")


class ReduceOp(enum.StrEnum):
    """Reduce operations by the names NCCL and MPI users know."""

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    AVG = "avg"


@dataclass(frozen=True, slots=True)
class PremulSum:
    """Multiply this rank's input by `factor`, then sum; made by `premul_sum`."""

    factor: int | float | complex

    def __str__(self) -> str:
        return "premul_sum"


def premul_sum(factor: int | float | complex) -> PremulSum:
    """Return the operation "multiply by `factor`, then sum", NCCL's PreMulSum.

    Parameters
    ----------
    factor : int, float or complex
        This rank's factor, in the units of the array; ranks may give different ones. The product
        is rounded to the array's dtype before the sum, as in NCCL.

    Raises
    ------
    ArgumentTypeError
        If `factor` is not a number.
    """
    value: Any = factor.item() if isinstance(factor, np.generic) else factor
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        raise ArgumentTypeError(f"premul_sum takes a number, not {type(factor).__name__}")
    return PremulSum(value)


Op = ReduceOp | PremulSum

_OPS: dict[Any, Op] = {
    **{op: op for op in ReduceOp},
    **{op.name: op for op in ReduceOp},
    "product": ReduceOp.PROD,
    "PRODUCT": ReduceOp.PROD,
    "mean": ReduceOp.AVG,
    "average": ReduceOp.AVG,
}

_ALLOWED: dict[Kind, frozenset[ReduceOp]] = {
    Kind.BOOL: frozenset({ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX}),
    Kind.INT: frozenset(ReduceOp),
    Kind.FLOAT: frozenset(ReduceOp),
    Kind.HALF: frozenset(ReduceOp),
    Kind.COMPLEX: frozenset({ReduceOp.SUM, ReduceOp.AVG}),
    Kind.OPAQUE: frozenset(),
}


def as_op(op: Any) -> Op:
    """Return the reduce operation that `op` names.

    Raises
    ------
    ArgumentValueError
        If the name is unknown.
    """
    if type(op) is PremulSum:
        return op
    try:
        return _OPS[op]
    except (KeyError, TypeError):
        names = ", ".join(repr(str(known)) for known in ReduceOp)
        raise ArgumentValueError(
            f"unknown reduce op {op!r}; known: {names}, pycomm.premul_sum(factor)"
        ) from None


def check_op(op: Op, dtype: DType) -> None:
    """Raise `ArgumentTypeError` if `op` has no meaning for `dtype`.

    The table is that of NCCL where NCCL has the dtype, so that host and device arrays take the same
    operations: complex arrays add as pairs of reals and have no product and no order; a bool sum is
    a logical or, as in NumPy; float8 is moved, never summed.
    """
    if type(op) is PremulSum:
        _check_factor(op, dtype)
    elif op not in _ALLOWED[dtype.kind]:
        allowed = sorted(_ALLOWED[dtype.kind])
        listed = f"allowed: {', '.join(allowed)}" if allowed else "it can be moved, not reduced"
        raise ArgumentTypeError(f"op {str(op)!r} is not defined for {dtype.name}; {listed}")


def _check_factor(op: PremulSum, dtype: DType) -> None:
    if dtype.kind in (Kind.BOOL, Kind.OPAQUE):
        raise ArgumentTypeError(f"op 'premul_sum' is not defined for {dtype.name}")
    if isinstance(op.factor, complex):
        if dtype.kind is Kind.COMPLEX:
            return
        raise ArgumentTypeError(f"premul_sum({op.factor}) is complex, the array is {dtype.name}")
    try:
        float(op.factor)
    except OverflowError:
        raise ArgumentValueError(
            "the factor of premul_sum is larger than any dtype can hold"
        ) from None
    if dtype.kind is Kind.INT:
        limits = np.iinfo(dtype.numpy)
        if not isinstance(op.factor, int) or not limits.min <= op.factor <= limits.max:
            raise ArgumentValueError(
                f"premul_sum({op.factor}) needs a factor that {dtype.name} can hold"
            )

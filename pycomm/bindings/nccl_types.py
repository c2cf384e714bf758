"""The structures, enumerations and constants of nccl.h, under their exact names.

A structure that carries its own size grows from version to version, only at its end. NCCL copies
``min(size, its own size)`` bytes and then looks at `version`: what is newer than that keeps its
default. Two things follow, and both are why `config` and its sisters write the numbers of the
header that this file repeats (`NCCL_VERSION_CODE`), never those of the library in use:

* an older library reads the beginning, which it knows, and does not see the rest: a field that it
  lacks is ignored without a word (`SINCE` says which library has it);
* a newer library sees the old `version` and does not take the fields that it added for set.

2.14 to 2.16 had one field, `blocking`, and no word for unset: they refuse settings without it.
"""
# The names are those of C.
# ruff: noqa: N801, N815

import ctypes
from collections.abc import Mapping
from ctypes import c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from enum import IntEnum
from typing import Any, TypeVar

__all__ = [
    "NCCL_API_MAGIC", "NCCL_COMM_NULL", "NCCL_CONFIG_UNDEF_INT", "NCCL_CONFIG_UNDEF_PTR",
    "NCCL_CTA_POLICY_DEFAULT", "NCCL_CTA_POLICY_EFFICIENCY", "NCCL_CTA_POLICY_ZERO",
    "NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH", "NCCL_REVOKE_DEFAULT", "NCCL_SHRINK_ABORT",
    "NCCL_SHRINK_DEFAULT", "NCCL_SPLIT_NOCOLOR", "NCCL_SUSPEND_MEM", "NCCL_UNDEF_FLOAT",
    "NCCL_UNIQUE_ID_BYTES", "NCCL_VERSION_CODE", "NCCL_WIN_CFT_COUNTED",
    "NCCL_WIN_COLL_SYMMETRIC", "NCCL_WIN_DEFAULT", "NCCL_WIN_GIN_ONLY",
    "NCCL_WIN_REQUIRED_ALIGNMENT", "NCCL_WIN_STRICT_ORDERING", "SINCE", "TYPES", "coll_config",
    "config", "encryption_config", "ncclCollConfig_t", "ncclCommMemStat_t", "ncclConfigExt_key",
    "ncclConfigExt_t", "ncclConfigExt_val", "ncclConfig_t", "ncclDataType_t",
    "ncclEncryptionConfig_t", "ncclEncryptionMode_t", "ncclHostCftMode_t", "ncclNvlsHostMode_t",
    "ncclRedOp_dummy_t", "ncclRedOp_t", "ncclResult_t", "ncclScalarResidence_t",
    "ncclSimInfo_t", "ncclUniqueId", "ncclWaitSignalDesc_t", "sim_info",
]  # fmt: skip

NCCL_MAJOR = 2
NCCL_MINOR = 32
NCCL_PATCH = 3
NCCL_VERSION_CODE = 23203

NCCL_COMM_NULL = None
NCCL_UNIQUE_ID_BYTES = 128
NCCL_CONFIG_UNDEF_INT = -(2**31)
NCCL_CONFIG_UNDEF_PTR = None
NCCL_SPLIT_NOCOLOR = -1
NCCL_UNDEF_FLOAT = -1.0
NCCL_API_MAGIC = 0xCAFEBEEF

NCCL_WIN_DEFAULT = 0x00
NCCL_WIN_COLL_SYMMETRIC = 0x01
NCCL_WIN_STRICT_ORDERING = 0x02
NCCL_WIN_GIN_ONLY = 0x04
NCCL_WIN_CFT_COUNTED = 0x08
NCCL_WIN_REQUIRED_ALIGNMENT = 4096

NCCL_CTA_POLICY_DEFAULT = 0x00
NCCL_CTA_POLICY_EFFICIENCY = 0x01
NCCL_CTA_POLICY_ZERO = 0x02

NCCL_SHRINK_DEFAULT = 0x00
NCCL_SHRINK_ABORT = 0x01
NCCL_REVOKE_DEFAULT = 0x00
NCCL_SUSPEND_MEM = 0x01


class ncclResult_t(IntEnum):
    """What a function returns."""

    ncclSuccess = 0
    ncclUnhandledCudaError = 1
    ncclSystemError = 2
    ncclInternalError = 3
    ncclInvalidArgument = 4
    ncclInvalidUsage = 5
    ncclRemoteError = 6
    ncclInProgress = 7
    ncclTimeout = 8
    ncclNumResults = 9


class ncclDataType_t(IntEnum):
    """Types of elements."""

    ncclInt8 = 0
    ncclChar = 0
    ncclUint8 = 1
    ncclInt32 = 2
    ncclInt = 2
    ncclUint32 = 3
    ncclInt64 = 4
    ncclUint64 = 5
    ncclFloat16 = 6
    ncclHalf = 6
    ncclFloat32 = 7
    ncclFloat = 7
    ncclFloat64 = 8
    ncclDouble = 8
    ncclBfloat16 = 9
    ncclFloat8e4m3 = 10
    ncclFloat8e5m2 = 11
    ncclNumTypes = 12


class ncclRedOp_dummy_t(IntEnum):
    """What the header measures the size of `ncclRedOp_t` with."""

    ncclNumOps_dummy = 5


class ncclRedOp_t(IntEnum):
    """Reduce operations; one that is created has a number from `ncclNumOps` on."""

    ncclSum = 0
    ncclProd = 1
    ncclMax = 2
    ncclMin = 3
    ncclAvg = 4
    ncclNumOps = 5
    ncclMaxRedOp = 0x7FFFFFFF


class ncclScalarResidence_t(IntEnum):
    """Where the factor of a created operation is, and when it is read."""

    ncclScalarDevice = 0
    ncclScalarHostImmediate = 1


class ncclCommMemStat_t(IntEnum):
    """What `ncclCommMemStats` can tell."""

    ncclStatGpuMemSuspend = 0
    ncclStatGpuMemSuspended = 1
    ncclStatGpuMemPersist = 2
    ncclStatGpuMemTotal = 3


class ncclHostCftMode_t(IntEnum):
    """Values of the field `hostCftMode`."""

    ncclHostCftDefault = NCCL_CONFIG_UNDEF_INT
    ncclHostCftEnable = 1
    ncclHostCftDisable = 2
    ncclHostCftFallback = 3


class ncclNvlsHostMode_t(IntEnum):
    """Values of the field `nvlsHostMode`."""

    ncclNvlsHostModeDefault = NCCL_CONFIG_UNDEF_INT
    ncclNvlsHostModeEnable = 0
    ncclNvlsHostModeDisableTransport = 1 << 0
    ncclNvlsHostModeDisableSymmetricMultimem = 1 << 1
    ncclNvlsHostModeDisable = 2**31 - 1


class ncclEncryptionMode_t(IntEnum):
    """Values of the field `mode` of `ncclEncryptionConfig_t`."""

    NCCL_ENCRYPTION_MODE_NONE = 0
    NCCL_ENCRYPTION_MODE_PSK = 1


class ncclUniqueId(ctypes.Structure):
    """What the ranks of a new communicator find each other by.

    Take ``bytes(id)`` and ``ncclUniqueId.from_buffer_copy(data)``: the field ends at its first
    zero, as ctypes reads it.
    """

    _fields_ = [("internal", c_char * NCCL_UNIQUE_ID_BYTES)]


class ncclConfig_t(ctypes.Structure):
    """Settings of a communicator; made by `config`."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
        ("trafficClass", c_int),
        ("commName", c_char_p),
        ("collnetEnable", c_int),
        ("CTAPolicy", c_int),
        ("shrinkShare", c_int),
        ("nvlsCTAs", c_int),
        ("nChannelsPerNetPeer", c_int),
        ("nvlinkCentricSched", c_int),
        ("graphUsageMode", c_int),
        ("numRmaCtx", c_int),
        ("maxP2pPeers", c_int),
        ("graphStreamOrdering", c_int),
        ("launchOrderImplicit", c_int),
        ("numRmaSig", c_int),
        ("rmaEagerInit", c_int),
        ("hostCftMode", c_int),
        ("nvlsHostMode", c_int),
    ]


class ncclConfigExt_key(ctypes.Structure):
    """The key of `ncclConfigExt_t`; the header gives it no name."""

    _fields_ = [("vendorId", c_int), ("optionId", c_int)]


class ncclConfigExt_val(ctypes.Union):
    """The value of `ncclConfigExt_t`; the header gives it no name."""

    _fields_ = [("i", c_int), ("s", c_char_p), ("raw", c_void_p)]


class ncclConfigExt_t(ctypes.Structure):
    """One setting of a vendor, in a list."""

    _fields_ = [("next", c_void_p), ("key", ncclConfigExt_key), ("val", ncclConfigExt_val)]


class ncclCollConfig_t(ctypes.Structure):
    """Settings of one collective call; made by `coll_config`."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("ext", c_void_p),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("nvlsCTAs", c_int),
        ("cgaClusterSize", c_int),
        ("algSelection", c_char_p),
        ("forceAlgSelection", c_int),
        ("CTAPolicy", c_int),
        ("userProfilerTag", c_uint64),
        ("launchCompletionEvent", c_void_p),
    ]


class ncclSimInfo_t(ctypes.Structure):
    """What `ncclGroupSimulateEnd` answers; made by `sim_info`."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("estimatedTime", c_float),
    ]


class ncclWaitSignalDesc_t(ctypes.Structure):
    """How many signals to wait for, and from whom."""

    _fields_ = [("opCnt", c_int), ("peer", c_int), ("sigIdx", c_int), ("ctx", c_int)]


class ncclEncryptionConfig_t(ctypes.Structure):
    """How sockets are encrypted; made by `encryption_config`."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("mode", c_int),
        ("psk", c_char_p),
    ]


# First versions of what not every library has: values of enumerations, and fields of `ncclConfig_t`
# and `ncclCollConfig_t`. A library that lacks a value answers with ncclInvalidArgument at best;
# one that lacks a field ignores it.
SINCE: Mapping[str, str] = {
    "ncclAvg": "2.10",
    "ncclBfloat16": "2.10",
    "ncclRemoteError": "2.13",
    "ncclInProgress": "2.14",
    "ncclFloat8e4m3": "2.24",
    "ncclFloat8e5m2": "2.24",
    "ncclTimeout": "2.30",
    "ncclConfig_t.blocking": "2.14",
    "ncclConfig_t.cgaClusterSize": "2.17",
    "ncclConfig_t.minCTAs": "2.17",
    "ncclConfig_t.maxCTAs": "2.17",
    "ncclConfig_t.netName": "2.17",
    "ncclConfig_t.splitShare": "2.18",
    "ncclConfig_t.trafficClass": "2.26",
    "ncclConfig_t.commName": "2.27",
    "ncclConfig_t.collnetEnable": "2.27",
    "ncclConfig_t.CTAPolicy": "2.27",
    "ncclConfig_t.shrinkShare": "2.27",
    "ncclConfig_t.nvlsCTAs": "2.27",
    "ncclConfig_t.nChannelsPerNetPeer": "2.28",
    "ncclConfig_t.nvlinkCentricSched": "2.28",
    "ncclConfig_t.graphUsageMode": "2.29",
    "ncclConfig_t.numRmaCtx": "2.29",
    "ncclConfig_t.maxP2pPeers": "2.30",
    "ncclConfig_t.graphStreamOrdering": "2.30.5",
    "ncclConfig_t.launchOrderImplicit": "2.31",
    "ncclConfig_t.numRmaSig": "2.31",
    "ncclConfig_t.rmaEagerInit": "2.31",
    "ncclConfig_t.hostCftMode": "2.31",
    "ncclConfig_t.nvlsHostMode": "2.32",
    "ncclCollConfig_t.launchCompletionEvent": "2.32",
}

_SIM_INFO_MAGIC = 0x74685283  # only in NCCL_SIM_INFO_INITIALIZER

# What the initializers of the header put into fields that are not UNDEF_INT and not NULL.
_DEFAULTS: Mapping[type[ctypes.Structure], Mapping[str, Any]] = {
    ncclConfig_t: {"magic": NCCL_API_MAGIC},
    ncclCollConfig_t: {"magic": NCCL_API_MAGIC, "forceAlgSelection": 1},
    ncclSimInfo_t: {"magic": _SIM_INFO_MAGIC, "estimatedTime": NCCL_UNDEF_FLOAT},
    ncclEncryptionConfig_t: {
        "magic": NCCL_API_MAGIC,
        "mode": ncclEncryptionMode_t.NCCL_ENCRYPTION_MODE_NONE,
    },
}

S = TypeVar("S", bound=ctypes.Structure)


def _initial(kind: type[S], fields: Mapping[str, Any]) -> S:
    made = kind()  # zeros: NULL, and 0 in what is no int
    for name, ctype, *_ in kind._fields_:
        if ctype is c_int:
            setattr(made, name, NCCL_CONFIG_UNDEF_INT)
    head = {"size": ctypes.sizeof(kind), "version": NCCL_VERSION_CODE}
    for name, value in {**head, **_DEFAULTS[kind], **fields}.items():
        if not hasattr(made, name):  # or Python would make an attribute of its own
            raise AttributeError(f"{kind.__name__} has no field {name}")
        setattr(made, name, value)
    return made


def config(**fields: Any) -> ncclConfig_t:
    """Return settings of a communicator, `NCCL_CONFIG_INITIALIZER` but for the fields given.

    Keep it until the call is over, and for a communicator that does not block until it is made.
    """
    return _initial(ncclConfig_t, fields)


def coll_config(**fields: Any) -> ncclCollConfig_t:
    """Return settings of a call, `NCCL_COLLCONFIG_INITIALIZER` but for the fields given."""
    return _initial(ncclCollConfig_t, fields)


def sim_info(**fields: Any) -> ncclSimInfo_t:
    """Return room for the answer of a simulation, `NCCL_SIM_INFO_INITIALIZER`."""
    return _initial(ncclSimInfo_t, fields)


def encryption_config(**fields: Any) -> ncclEncryptionConfig_t:
    """Return settings of encryption, `NCCL_ENCRYPTION_CONFIG_INITIALIZER` but for the fields."""
    return _initial(ncclEncryptionConfig_t, fields)


# What the C types of the prototypes are in ctypes.
TYPES: Mapping[str, Any] = {
    "ncclComm_t": c_void_p,
    "ncclWindow_t": c_void_p,
    "ncclParamHandle_t": c_void_p,
    "cudaStream_t": c_void_p,
    "ncclResult_t": c_int,
    "ncclDataType_t": c_int,
    "ncclRedOp_t": c_int,
    "ncclScalarResidence_t": c_int,
    "ncclCommMemStat_t": c_int,
    "ncclUniqueId": ncclUniqueId,
    "ncclConfig_t": ncclConfig_t,
    "ncclCollConfig_t": ncclCollConfig_t,
    "ncclSimInfo_t": ncclSimInfo_t,
    "ncclWaitSignalDesc_t": ncclWaitSignalDesc_t,
    "ncclEncryptionConfig_t": ncclEncryptionConfig_t,
}

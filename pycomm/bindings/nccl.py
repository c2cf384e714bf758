"""libnccl: every function of nccl.h (2.32) for the host, and what its codes mean.

``nccl.ncclAllReduce(...)`` returns the code of NCCL; ``nccl.check(code, "ncclAllReduce")`` turns
one that is a failure into its exception.
"""

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from pycomm.bindings._library import load_nccl
from pycomm.bindings._table import Table
from pycomm.bindings.nccl_types import TYPES, ncclResult_t
from pycomm.errors import (
    NCCLError,
    NCCLInternalError,
    NCCLInvalidArgumentError,
    NCCLInvalidUsageError,
    NCCLRemoteError,
    NCCLSystemError,
    NCCLTimeoutError,
    NCCLUnhandledCudaError,
)

__all__ = ["NCCL", "nccl"]

# Since 2.0 no prototype has changed, and none has gone.
PROTOTYPES: Mapping[str, str] = {
    "2.0": """
        ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId);
        ncclResult_t ncclCommInitRank(
            ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);
        ncclResult_t ncclCommInitAll(ncclComm_t* comm, int ndev, const int* devlist);
        ncclResult_t ncclCommDestroy(ncclComm_t comm);
        const char* ncclGetErrorString(ncclResult_t result);
        ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
        ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device);
        ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);
        ncclResult_t ncclReduce(
            const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
            ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
        ncclResult_t ncclBcast(
            void* buff, size_t count, ncclDataType_t datatype, int root,
            ncclComm_t comm, cudaStream_t stream);
        ncclResult_t ncclAllReduce(
            const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
            ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
        ncclResult_t ncclReduceScatter(
            const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype,
            ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
        ncclResult_t ncclAllGather(
            const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
            ncclComm_t comm, cudaStream_t stream);
        ncclResult_t ncclGroupStart();
        ncclResult_t ncclGroupEnd();
    """,
    "2.2": """
        ncclResult_t ncclBroadcast(
            const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
            ncclComm_t comm, cudaStream_t stream);
    """,
    "2.3": """
        ncclResult_t ncclGetVersion(int* version);
    """,
    "2.4": """
        ncclResult_t ncclCommAbort(ncclComm_t comm);
        ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError);
    """,
    "2.7": """
        ncclResult_t ncclSend(
            const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
            ncclComm_t comm, cudaStream_t stream);
        ncclResult_t ncclRecv(
            void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
            ncclComm_t comm, cudaStream_t stream);
    """,
    "2.11": """
        ncclResult_t ncclRedOpCreatePreMulSum(
            ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
            ncclScalarResidence_t residence, ncclComm_t comm);
        ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);
    """,
    "2.13": """
        const char* ncclGetLastError(ncclComm_t comm);
    """,
    "2.14": """
        ncclResult_t ncclCommInitRankConfig(
            ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t* config);
        ncclResult_t ncclCommFinalize(ncclComm_t comm);
    """,
    "2.18": """
        ncclResult_t ncclCommSplit(
            ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config);
    """,
    "2.19": """
        ncclResult_t ncclMemAlloc(void** ptr, size_t size);
        ncclResult_t ncclMemFree(void* ptr);
        ncclResult_t ncclCommRegister(
            const ncclComm_t comm, void* buff, size_t size, void** handle);
        ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle);
    """,
    "2.22": """
        ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simInfo);
    """,
    "2.23": """
        ncclResult_t ncclCommInitRankScalable(
            ncclComm_t* newcomm, int nranks, int myrank, int nId, ncclUniqueId* commIds,
            ncclConfig_t* config);
    """,
    "2.24": """
        void ncclResetDebugInit();
    """,
    "2.27": """
        ncclResult_t ncclCommShrink(
            ncclComm_t comm, int* excludeRanksList, int excludeRanksCount, ncclComm_t* newcomm,
            ncclConfig_t* config, int shrinkFlags);
        ncclResult_t ncclCommWindowRegister(
            ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win, int winFlags);
        ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);
    """,
    "2.28": """
        ncclResult_t ncclAlltoAll(
            const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
            ncclComm_t comm, cudaStream_t stream);
        ncclResult_t ncclGather(
            const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
            ncclComm_t comm, cudaStream_t stream);
        ncclResult_t ncclScatter(
            const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
            ncclComm_t comm, cudaStream_t stream);
    """,
    "2.28.7": """
        ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);
    """,
    "2.29": """
        ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* uniqueId);
        ncclResult_t ncclCommGrow(
            ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank,
            ncclComm_t* newcomm, ncclConfig_t* config);
        ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void** outUserPtr);
        ncclResult_t ncclPutSignal(
            const void* localbuff, size_t count, ncclDataType_t datatype, int peer,
            ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags,
            ncclComm_t comm, cudaStream_t stream);
        ncclResult_t ncclSignal(
            int peer, int sigIdx, int ctx, unsigned int flags,
            ncclComm_t comm, cudaStream_t stream);
        ncclResult_t ncclWaitSignal(
            int nDesc, ncclWaitSignalDesc_t* signalDescs, ncclComm_t comm, cudaStream_t stream);
    """,
    "2.29.7": """
        ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);
        ncclResult_t ncclCommResume(ncclComm_t comm);
        ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value);
    """,
    "2.30.4": """
        ncclResult_t ncclParamBind(ncclParamHandle_t* out, const char* key);
        ncclResult_t ncclParamGetI8(ncclParamHandle_t h, int8_t* out);
        ncclResult_t ncclParamGetI16(ncclParamHandle_t h, int16_t* out);
        ncclResult_t ncclParamGetI32(ncclParamHandle_t h, int32_t* out);
        ncclResult_t ncclParamGetI64(ncclParamHandle_t h, int64_t* out);
        ncclResult_t ncclParamGetU8(ncclParamHandle_t h, uint8_t* out);
        ncclResult_t ncclParamGetU16(ncclParamHandle_t h, uint16_t* out);
        ncclResult_t ncclParamGetU32(ncclParamHandle_t h, uint32_t* out);
        ncclResult_t ncclParamGetU64(ncclParamHandle_t h, uint64_t* out);
        ncclResult_t ncclParamGetStr(ncclParamHandle_t h, const char** out);
        ncclResult_t ncclParamGet(ncclParamHandle_t h, void* out, int maxLen, int* len);
        ncclResult_t ncclParamGetParameter(const char* key, const char** value, int* valueLen);
        ncclResult_t ncclParamGetAllParameterKeys(const char*** table, int* tableLen);
        void ncclParamDumpAll(void);
    """,
    "2.31": """
        ncclResult_t ncclAllReduceConfig(
            const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
            ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config);
        ncclResult_t ncclBroadcastConfig(
            const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
            ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config);
        ncclResult_t ncclReduceConfig(
            const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
            ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream,
            const ncclCollConfig_t* config);
        ncclResult_t ncclAllGatherConfig(
            const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
            ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config);
        ncclResult_t ncclReduceScatterConfig(
            const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype,
            ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config);
        ncclResult_t ncclAlltoAllConfig(
            const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
            ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config);
        ncclResult_t ncclGatherConfig(
            const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
            ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config);
        ncclResult_t ncclScatterConfig(
            const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root,
            ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config);
    """,
    "2.32": """
        ncclResult_t ncclSetEncryption(const ncclEncryptionConfig_t* config);
    """,
}

_ERRORS: Mapping[int | None, type[NCCLError]] = {
    kind.code: kind
    for kind in (
        NCCLUnhandledCudaError,
        NCCLSystemError,
        NCCLInternalError,
        NCCLInvalidArgumentError,
        NCCLInvalidUsageError,
        NCCLRemoteError,
        NCCLTimeoutError,
    )
}

_ADVICE: Mapping[int, str] = {
    ncclResult_t.ncclUnhandledCudaError: (
        "`pycomm info` shows the CUDA driver: it must be there and new enough for this NCCL"
    ),
    ncclResult_t.ncclSystemError: (
        "NCCL_SOCKET_IFNAME chooses the network interface; look at the limits on open files, locked"
        " and shared memory (ulimit -n, ulimit -l, /dev/shm)"
    ),
    ncclResult_t.ncclRemoteError: "look at the messages of the other ranks first",
}


class NCCL(Table):
    """The functions of libnccl, and the one place where its codes become exceptions."""

    provider: ClassVar[str] = "NCCL"

    def check(
        self, code: int, function: str, comm: Any = None, *, in_progress: bool = False
    ) -> None:
        """Raise unless a code is success.

        Parameters
        ----------
        code : int
            What `function` returned.
        function : str
            Its name, for the message.
        comm : handle, optional
            The communicator of the call, whose last words are asked for.
        in_progress : bool
            Whether ``ncclInProgress`` is fine too: of a communicator that does not block.

        Raises
        ------
        NCCLError
            The subclass that belongs to the code.
        """
        if code and not (in_progress and code == ncclResult_t.ncclInProgress):
            raise self.error(code, function, comm)

    def error(self, code: int, function: str, comm: Any = None) -> NCCLError:
        """Return the exception for a code that is not success; see `check`."""
        try:
            name = ncclResult_t(code).name
        except ValueError:
            name = "code"
        lines = [f"{function} failed: {name} ({code}): {_text(self.ncclGetErrorString(code))}"]
        last = _text(self.ncclGetLastError(comm)) if self.has("ncclGetLastError") else ""
        if last:
            # It is never cleared: a failure without words of its own shows those of an older one.
            lines.append(f"the last that NCCL had to say: {last}")
        if code in _ADVICE:
            lines.append(_ADVICE[code])
        if not os.environ.get("NCCL_DEBUG"):
            lines.append("NCCL_DEBUG=INFO in the environment makes NCCL tell more")
        error = _ERRORS.get(code, NCCLError)("; ".join(lines))
        error.code = code
        error.function = function
        error.last_error = last or None
        return error


def _text(words: bytes | None) -> str:
    return (words or b"").decode(errors="replace").strip()


nccl = NCCL(PROTOTYPES, TYPES, load_nccl)

/* The calls that communicate: checked here, issued by the group. */
#include "nccl_state.h"

static ncclResult_t check_buffer(const call *of, const void *buffer, size_t bytes,
                                 const char *which)
{
    if (bytes == 0)
        return ncclSuccess;
    int device = double_memory_device((CUdeviceptr)buffer, bytes);
    if (device == of->comm->device)
        return ncclSuccess;
    if (device >= 0)
        return fail(ncclInvalidArgument, "%s : %s allocated on device %d mismatchs with NCCL "
                                         "device %d",
                    call_name(of->kind), which, device, of->comm->device);
    return fail(ncclInvalidArgument, "%s : %s is not a valid pointer to %zu bytes",
                call_name(of->kind), which, bytes);
}

static ncclResult_t check_operator(call *of)
{
    if (of->op < 0 || of->op >= ncclNumOps + MAX_OPERATORS)
        return fail(ncclInvalidArgument, "%s : invalid reduction operation %d",
                    call_name(of->kind), of->op);
    if (of->op < ncclNumOps)
        return ncclSuccess;
    of->operator = of->comm->operators[of->op - ncclNumOps];
    if (!of->operator.used)
        return fail(ncclInvalidArgument, "%s : reduction operation %d unknown to communicator",
                    call_name(of->kind), of->op);
    if (of->operator.datatype != of->datatype)
        return fail(ncclInvalidArgument,
                    "%s : reduction operation %d was created for another datatype",
                    call_name(of->kind), of->op);
    return ncclSuccess;
}

static ncclResult_t check(call *of, const char *function)
{
    TRY(comm_ready(of->comm, function));
    ncclComm_t comm = of->comm;
    if (comm->revoked || comm->finalised || comm->suspended) {
        const char *state = comm->revoked     ? "revoked"
                            : comm->finalised ? "finalized"
                                              : "suspended";
        misuse("%s on a communicator that is %s", function, state);
        return fail(ncclInvalidUsage, "%s : the communicator is %s", function, state);
    }
    bool unknown = DOUBLE_NCCL_VERSION < 22400 && of->datatype >= ncclFloat8e4m3;
    if (unknown || type_bytes(of->datatype) == 0)
        return fail(ncclInvalidArgument, "%s : invalid type %d", function, (int)of->datatype);
    if (of->root < 0 || of->root >= comm->nranks)
        return fail(ncclInvalidArgument, "%s : invalid root or peer %d (nranks=%d)", function,
                    of->root, comm->nranks);
    TRY(check_operator(of));
    size_t reads, writes;
    if (of->count > SIZE_MAX / 8 / MAX_RANKS)
        return fail(ncclInvalidArgument, "%s : impossible count", function);
    call_spans(of, &reads, &writes);
    TRY(check_buffer(of, of->send, reads, "sendbuff"));
    TRY(check_buffer(of, of->receive, writes, "recvbuff"));
    int device = comm->device;
    if (of->stream && of->stream != CU_STREAM_LEGACY && of->stream != CU_STREAM_PER_THREAD)
        TRY(cuda_failure(double_stream_device(of->stream, &device)));
    if (device != comm->device)
        return fail(ncclInvalidUsage, "%s : the stream is of device %d, the communicator of %d",
                    function, device, comm->device);
    return ncclSuccess;
}

ncclResult_t call_issue(call *of, const char *function)
{
    __attribute__((cleanup(comm_leave))) ncclComm_t entered = comm_enter(of->comm, function);
    ncclResult_t code = check(of, function);
    if (code != ncclSuccess) {
        free(of->awaited);
        return group_failed(code);
    }
    return group_add(of);
}

#define ISSUE(...)                                                             \
    call issued_ = {__VA_ARGS__, .comm = comm, .stream = stream};              \
    return call_issue(&issued_, __func__)

static ncclResult_t check_config(const ncclCollConfig_t *config)
{
    if (!config)
        return ncclSuccess;
    if (config->magic != NCCL_API_MAGIC || config->size < sizeof *config)
        return group_failed(fail(ncclInvalidArgument, "ncclCollConfig_t argument not initialized "
                                                      "via NCCL_COLLCONFIG_INITIALIZER"));
    if (config->launchCompletionEvent)
        return group_failed(fail(ncclInvalidUsage, "the double knows no launchCompletionEvent"));
    return ncclSuccess;
}

#define UNPACK(...) __VA_ARGS__
/* A collective, and the form of it that takes a configuration. */
#define CONFIGURED(name, parameters, ...)                                          \
    ncclResult_t name parameters                                                   \
    {                                                                              \
        ENTER();                                                                   \
        ISSUE(__VA_ARGS__);                                                        \
    }                                                                              \
    ncclResult_t name##Config(UNPACK parameters, const ncclCollConfig_t *config)   \
    {                                                                              \
        ENTER();                                                                   \
        TRY(check_config(config));                                                 \
        ISSUE(__VA_ARGS__);                                                        \
    }

CONFIGURED(ncclAllReduce,
           (const void *send, void *receive, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
            ncclComm_t comm, cudaStream_t stream),
           ALL_REDUCE, .send = send, .receive = receive, .count = count, .datatype = datatype,
           .op = op)

CONFIGURED(ncclBroadcast,
           (const void *send, void *receive, size_t count, ncclDataType_t datatype, int root,
            ncclComm_t comm, cudaStream_t stream),
           BROADCAST, .send = send, .receive = receive, .count = count, .datatype = datatype,
           .root = root)

CONFIGURED(ncclReduce,
           (const void *send, void *receive, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
            int root, ncclComm_t comm, cudaStream_t stream),
           REDUCE, .send = send, .receive = receive, .count = count, .datatype = datatype,
           .op = op, .root = root)

CONFIGURED(ncclAllGather,
           (const void *send, void *receive, size_t count, ncclDataType_t datatype,
            ncclComm_t comm, cudaStream_t stream),
           ALL_GATHER, .send = send, .receive = receive, .count = count, .datatype = datatype)

CONFIGURED(ncclReduceScatter,
           (const void *send, void *receive, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
            ncclComm_t comm, cudaStream_t stream),
           REDUCE_SCATTER, .send = send, .receive = receive, .count = count, .datatype = datatype,
           .op = op)

CONFIGURED(ncclAlltoAll,
           (const void *send, void *receive, size_t count, ncclDataType_t datatype,
            ncclComm_t comm, cudaStream_t stream),
           ALL_TO_ALL, .send = send, .receive = receive, .count = count, .datatype = datatype)

CONFIGURED(ncclGather,
           (const void *send, void *receive, size_t count, ncclDataType_t datatype, int root,
            ncclComm_t comm, cudaStream_t stream),
           GATHER, .send = send, .receive = receive, .count = count, .datatype = datatype,
           .root = root)

CONFIGURED(ncclScatter,
           (const void *send, void *receive, size_t count, ncclDataType_t datatype, int root,
            ncclComm_t comm, cudaStream_t stream),
           SCATTER, .send = send, .receive = receive, .count = count, .datatype = datatype,
           .root = root)

ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t datatype, int root,
                       ncclComm_t comm, cudaStream_t stream)
{
    ENTER();
    ISSUE(BROADCAST, .send = buffer, .receive = buffer, .count = count, .datatype = datatype,
          .root = root);
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    ENTER();
    ISSUE(SEND, .send = send, .count = count, .datatype = datatype, .root = peer);
}

ncclResult_t ncclRecv(void *receive, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    ENTER();
    ISSUE(RECEIVE, .receive = receive, .count = count, .datatype = datatype, .root = peer);
}

/* --- operators ------------------------------------------------------------------------------- */

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t comm)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    TRY(comm_ready(comm, __func__));
    size_t bytes = type_bytes(datatype);
    if (!op || !scalar || bytes == 0)
        return fail(ncclInvalidArgument, "%s: op, scalar or datatype is not valid", __func__);
    for (int i = 0; i < MAX_OPERATORS; i++) {
        operator_state *created = &comm->operators[i];
        if (created->used)
            continue;
        *created = (operator_state){.datatype = datatype};
        if (residence == ncclScalarHostImmediate)
            memcpy(created->scalar, scalar, bytes);
        else if (double_translate((CUdeviceptr)scalar, bytes))
            created->device_scalar = scalar;
        else
            return fail(ncclInvalidArgument, "%s: scalar is not memory of the device", __func__);
        created->used = true;
        *op = (ncclRedOp_t)(ncclNumOps + i);
        return ncclSuccess;
    }
    return fail(ncclInvalidUsage, "%s: the double has room for %d operators", __func__,
                MAX_OPERATORS);
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    if ((int)op >= 0 && op < ncclNumOps)
        return fail(ncclInvalidArgument, "ncclRedOpDestroy : operator is a NCCL builtin.");
    TRY(comm_ready(comm, __func__));
    int index = (int)op - ncclNumOps;
    if (index < 0 || index >= MAX_OPERATORS || !comm->operators[index].used)
        return fail(ncclInvalidArgument, "ncclRedOpDestroy : operator unknown to communicator");
    comm->operators[index].used = false;
    return ncclSuccess;
}

/*
 * Exchange: how the calls of a group run over the sockets of a communicator.
 *
 * Every call becomes a message to and from every rank that it concerns: a head that describes the
 * call, then the data. So two ranks that call different things find out, which hardware does not.
 * All sockets make progress together; an abort or an error of the communicator ends the run.
 */
#include "nccl_state.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

typedef struct {
    int kind, datatype, op, root;
    unsigned long long count, bytes;
    unsigned char scalar[8]; /* the sender's own: it may differ between ranks */
} head;

#define COMPARED offsetof(head, scalar)

typedef struct message {
    struct message *next;
    head described;
    const call *of;
    char *data;
    size_t done; /* bytes of head and data together */
    unsigned char *scalar; /* where that of the sender goes */
} message;

typedef struct {
    message *first, **last;
} message_queue;

typedef struct {
    ncclComm_t comm;
    message_queue out[MAX_RANKS], in[MAX_RANKS];
} traffic;

const char *call_name(call_kind kind)
{
    static const char *const names[] = {
        "ncclAllReduce", "ncclBroadcast",  "ncclReduce",    "ncclAllGather", "ncclReduceScatter",
        "ncclAlltoAll",  "ncclGather",     "ncclScatter",   "ncclSend",      "ncclRecv",
        "ncclPutSignal", "ncclSignal",     "ncclWaitSignal"};
    return (unsigned)kind < sizeof names / sizeof *names ? names[kind] : "?";
}

static head describe(const call *of, size_t bytes)
{
    head described = {of->kind, of->datatype, of->op, of->root, of->count, bytes, {0}};
    if (of->op >= ncclNumOps)
        described.op = ncclNumOps; /* handles differ between ranks */
    if (of->kind == SEND || of->kind == RECEIVE) {
        described.kind = SEND;
        described.root = 0;
    }
    return described;
}

static message *add(message_queue *to, const call *of, void *data, size_t bytes)
{
    message *added = allocate(sizeof *added);
    added->described = describe(of, bytes);
    added->of = of;
    added->data = data;
    if (!to->first)
        to->last = &to->first;
    *to->last = added;
    to->last = &added->next;
    return added;
}

static void pop(message_queue *from)
{
    message *gone = from->first;
    from->first = gone->next;
    free(gone);
}

/* --- progress -------------------------------------------------------------------------------- */

static void tell(char text[160], const head *of, bool receiver)
{
    static const char *const types[] = {"int8",    "uint8",   "int32",   "uint32",
                                        "int64",   "uint64",  "float16", "float32",
                                        "float64", "bfloat16", "float8e4m3", "float8e5m2"};
    static const char *const ops[] = {"sum", "prod", "max", "min", "avg", "premulsum"};
    call_kind kind = of->kind == SEND && receiver ? RECEIVE : (call_kind)of->kind;
    bool point = of->kind == SEND, reduces = kind == ALL_REDUCE || kind == REDUCE ||
                                             kind == REDUCE_SCATTER;
    int used = snprintf(text, 160, "%s(count=%llu, %s", call_name(kind), of->count,
                        (unsigned)of->datatype < ncclNumTypes ? types[of->datatype] : "?");
    if (reduces)
        used += snprintf(text + used, 160 - (size_t)used, ", %s",
                         (unsigned)of->op <= ncclNumOps ? ops[of->op] : "?");
    if (!point && (kind == REDUCE || kind == BROADCAST || kind == GATHER || kind == SCATTER))
        used += snprintf(text + used, 160 - (size_t)used, ", root=%d", of->root);
    snprintf(text + used, 160 - (size_t)used, ")");
}

static ncclResult_t mismatch(ncclComm_t comm, int peer, const head *theirs, const head *ours)
{
    char their_text[160], our_text[160];
    tell(their_text, theirs, false);
    tell(our_text, ours, true);
    return fail(ncclInvalidUsage, "mismatch of calls: rank %d called %s while rank %d called %s",
                peer, their_text, comm->rank, our_text);
}

static ncclResult_t lost(ncclComm_t comm, int peer)
{
    return fail(ncclRemoteError, "rank %d lost its connection to rank %d", comm->rank, peer);
}

/* A message that the peer described and this rank did not expect at all is left unread: it may
 * belong to the next call. */
static ncclResult_t receive_some(ncclComm_t comm, int peer, message_queue *from)
{
    while (from->first) {
        message *next = from->first;
        head theirs;
        ssize_t got;
        int fd = comm->sockets[DATA][peer];
        if (next->done < sizeof(head)) {
            got = recv(fd, &theirs, sizeof theirs, MSG_DONTWAIT | MSG_PEEK);
            if (got > 0 && got < (ssize_t)sizeof theirs)
                return ncclSuccess;
            if (got > 0) {
                if (memcmp(&theirs, &next->described, COMPARED) != 0)
                    return mismatch(comm, peer, &theirs, &next->described);
                got = recv(fd, &theirs, sizeof theirs, MSG_DONTWAIT);
                if (next->scalar)
                    memcpy(next->scalar, theirs.scalar, sizeof theirs.scalar);
            }
        } else {
            size_t at = next->done - sizeof(head);
            got = recv(fd, next->data + at, next->described.bytes - at, MSG_DONTWAIT);
        }
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            return ncclSuccess;
        if (got <= 0)
            return lost(comm, peer);
        next->done += (size_t)got;
        if (next->done == sizeof(head) + next->described.bytes)
            pop(from);
    }
    return ncclSuccess;
}

static ncclResult_t send_some(ncclComm_t comm, int peer, message_queue *to)
{
    while (to->first) {
        message *next = to->first;
        const char *from = (const char *)&next->described + next->done;
        size_t left = sizeof(head) - next->done;
        if (next->done >= sizeof(head)) {
            size_t at = next->done - sizeof(head);
            from = next->data + at;
            left = next->described.bytes - at;
        }
        ssize_t sent = send(comm->sockets[DATA][peer], from, left, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR))
            return ncclSuccess;
        if (sent < 0)
            return lost(comm, peer);
        next->done += (size_t)sent;
        if (next->done == sizeof(head) + next->described.bytes)
            pop(to);
    }
    return ncclSuccess;
}

/* ncclInProgress when the communicator was stopped. */
static ncclResult_t progress(traffic *of)
{
    ncclComm_t comm = of->comm;
    for (;;) {
        if (comm_stopped(comm))
            return ncclInProgress;
        if (comm->muted) {
            usleep(POLL_MS * 1000);
            continue;
        }
        struct pollfd fds[MAX_RANKS];
        nfds_t count = 0;
        ncclResult_t failed = ncclSuccess;
        /* Everything is said before anything is heard, so that a mismatch shows on both sides. */
        for (int peer = 0; peer < comm->nranks; peer++) {
            ncclResult_t sent = send_some(comm, peer, &of->out[peer]);
            failed = failed == ncclSuccess ? sent : failed;
        }
        for (int peer = 0; peer < comm->nranks; peer++) {
            ncclResult_t heard = receive_some(comm, peer, &of->in[peer]);
            if (heard == ncclInvalidUsage || failed == ncclSuccess)
                failed = heard;
            short events = (short)((of->in[peer].first ? POLLIN : 0) |
                                   (of->out[peer].first ? POLLOUT : 0));
            if (events)
                fds[count++] = (struct pollfd){comm->sockets[DATA][peer], events, 0};
        }
        if (failed != ncclSuccess || count == 0)
            return failed;
        poll(fds, count, POLL_MS);
    }
}

/* --- calls ----------------------------------------------------------------------------------- */

typedef struct {
    const call *of;
    char *send, *receive; /* translated */
    unsigned char scalars[MAX_RANKS][8];
    char *gathered;       /* what the others gave to a reduction */
    size_t each;          /* bytes of the part of one rank */
} plan;

void call_spans(const call *of, size_t *reads, size_t *writes)
{
    size_t bytes = of->count * type_bytes(of->datatype), ranks = (size_t)of->comm->nranks;
    bool root = of->root == of->comm->rank;
    *reads = *writes = bytes;
    switch (of->kind) {
    case BROADCAST: *reads = root ? bytes : 0; break;
    case REDUCE: *writes = root ? bytes : 0; break;
    case ALL_GATHER: *writes = bytes * ranks; break;
    case REDUCE_SCATTER: *reads = bytes * ranks; break;
    case ALL_TO_ALL: *reads = *writes = bytes * ranks; break;
    case GATHER: *writes = root ? bytes * ranks : 0; break;
    case SCATTER: *reads = root ? bytes * ranks : 0; break;
    case SEND: case PUT_SIGNAL: *writes = 0; break;
    case RECEIVE: *reads = 0; break;
    case SIGNAL: case WAIT_SIGNAL: *reads = *writes = 0; break;
    default: break;
    }
}

static bool translate_buffers(plan *of)
{
    size_t reads, writes;
    call_spans(of->of, &reads, &writes);
    if (reads)
        of->send = double_translate((CUdeviceptr)of->of->send, reads);
    if (writes)
        of->receive = double_translate((CUdeviceptr)of->of->receive, writes);
    const operator_state *operator = &of->of->operator;
    const void *scalar = operator->scalar;
    size_t bytes = type_bytes(of->of->datatype);
    if (operator->device_scalar)
        scalar = double_translate((CUdeviceptr)operator->device_scalar, bytes);
    if (scalar)
        memcpy(of->scalars[of->of->comm->rank], scalar, bytes);
    return (!reads || of->send) && (!writes || of->receive) && scalar;
}

/* What goes to a peer and comes from it in a collective. */
static void exchange_with(traffic *of, plan *planned, int peer)
{
    const call *asked = planned->of;
    size_t each = planned->each, at = each * (size_t)peer;
    int rank = of->comm->rank;
    char *out = planned->send, *in = NULL;
    size_t out_bytes = each, in_bytes = each;
    bool to_root = peer == asked->root, from_root = rank == asked->root;
    switch (asked->kind) {
    case ALL_REDUCE: in = planned->gathered + at; break;
    case REDUCE:
        out_bytes = to_root ? each : 0;
        in_bytes = from_root ? each : 0;
        in = planned->gathered + at;
        break;
    case REDUCE_SCATTER:
        out = planned->send + at;
        in = planned->gathered + at;
        break;
    case BROADCAST:
        out_bytes = from_root ? each : 0;
        in_bytes = to_root ? each : 0;
        in = planned->receive;
        break;
    case ALL_GATHER: in = planned->receive + at; break;
    case ALL_TO_ALL:
        out = planned->send + at;
        in = planned->receive + at;
        break;
    case GATHER:
        out_bytes = to_root ? each : 0;
        in_bytes = from_root ? each : 0;
        in = planned->receive + at;
        break;
    case SCATTER:
        out_bytes = from_root ? each : 0;
        in_bytes = to_root ? each : 0;
        out = planned->send + at;
        in = planned->receive;
        break;
    default: break;
    }
    message *sent = add(&of->out[peer], asked, out, out_bytes);
    message *received = add(&of->in[peer], asked, in, in_bytes);
    memcpy(sent->described.scalar, planned->scalars[rank], sizeof sent->described.scalar);
    received->scalar = planned->scalars[peer];
}

static void move(char *target, const char *source, size_t bytes)
{
    if (bytes && target != source)
        memmove(target, source, bytes);
}

/* What this rank does with its own data when all data of the others is there. */
static void complete(plan *planned)
{
    const call *of = planned->of;
    size_t each = planned->each, mine = each * (size_t)of->comm->rank;
    bool root = of->root == of->comm->rank;
    switch (of->kind) {
    case BROADCAST:
        if (root)
            move(planned->receive, planned->send, each);
        break;
    case ALL_GATHER: move(planned->receive + mine, planned->send, each); break;
    case ALL_TO_ALL: move(planned->receive + mine, planned->send + mine, each); break;
    case GATHER:
        if (root)
            move(planned->receive + mine, planned->send, each);
        break;
    case SCATTER:
        if (root)
            move(planned->receive, planned->send + mine, each);
        break;
    case ALL_REDUCE: case REDUCE: case REDUCE_SCATTER: {
        if (of->kind == REDUCE && !root)
            break;
        void *inputs[MAX_RANKS];
        for (int rank = 0; rank < of->comm->nranks; rank++)
            inputs[rank] = planned->gathered + each * (size_t)rank;
        inputs[of->comm->rank] = planned->send + (of->kind == REDUCE_SCATTER ? mine : 0);
        reduce(of, planned->receive, inputs, of->comm->nranks, of->count,
               planned->scalars);
        break;
    }
    default: break;
    }
}

/* Sends to this rank itself meet its receives in order. */
static ncclResult_t pair_own(const group_calls *group, plan *plans)
{
    size_t receiving = 0;
    int rank = group->comm->rank;
    for (size_t i = 0; i < group->count; i++) {
        const call *sent = &group->calls[i];
        if (sent->kind != SEND || sent->root != rank)
            continue;
        while (receiving < group->count && (group->calls[receiving].kind != RECEIVE ||
                                            group->calls[receiving].root != rank))
            receiving++;
        if (receiving == group->count ||
            group->calls[receiving].count != sent->count ||
            group->calls[receiving].datatype != sent->datatype)
            return fail(ncclInvalidUsage, "rank %d sends to itself what it does not receive", rank);
        move(plans[receiving].receive, plans[i].send, plans[i].each);
        receiving++;
    }
    for (; receiving < group->count; receiving++)
        if (group->calls[receiving].kind == RECEIVE && group->calls[receiving].root == rank)
            return fail(ncclInvalidUsage, "rank %d receives from itself what it does not send",
                        rank);
    return ncclSuccess;
}

static void plan_call(traffic *of, plan *planned)
{
    const call *asked = planned->of;
    ncclComm_t comm = of->comm;
    if (asked->kind == SEND && asked->root != comm->rank)
        add(&of->out[asked->root], asked, planned->send, planned->each);
    else if (asked->kind == RECEIVE && asked->root != comm->rank)
        add(&of->in[asked->root], asked, planned->receive, planned->each);
    if (asked->kind >= SEND)
        return;
    bool reduces = asked->kind == ALL_REDUCE || asked->kind == REDUCE ||
                   asked->kind == REDUCE_SCATTER;
    if (reduces)
        planned->gathered = allocate(planned->each * (size_t)comm->nranks);
    for (int peer = 0; peer < comm->nranks; peer++)
        if (peer != comm->rank)
            exchange_with(of, planned, peer);
}

ncclResult_t exchange(const group_calls *group)
{
    traffic *of = allocate(sizeof *of);
    plan *plans = allocate(group->count * sizeof *plans);
    ncclResult_t result = ncclSuccess;
    of->comm = group->comm;
    for (size_t i = 0; i < group->count && result == ncclSuccess; i++) {
        plans[i].of = &group->calls[i];
        plans[i].each = group->calls[i].count * type_bytes(group->calls[i].datatype);
        if (!translate_buffers(&plans[i]))
            result = ncclUnhandledCudaError;
    }
    /* Collectives first: ranks may mix them with sends and receives in any order. */
    for (int points = 0; points <= 1 && result == ncclSuccess; points++)
        for (size_t i = 0; i < group->count; i++)
            if ((group->calls[i].kind >= SEND) == (points == 1))
                plan_call(of, &plans[i]);
    if (result == ncclSuccess)
        result = pair_own(group, plans);
    if (result == ncclSuccess)
        result = progress(of);
    for (size_t i = 0; i < group->count; i++) {
        if (result == ncclSuccess)
            complete(&plans[i]);
        free(plans[i].gathered);
    }
    for (size_t i = 0; i < group->count && result == ncclSuccess; i++)
        if (group->calls[i].kind > RECEIVE)
            result = side_run(&group->calls[i]);
    for (int peer = 0; peer < MAX_RANKS; peer++) {
        while (of->in[peer].first)
            pop(&of->in[peer]);
        while (of->out[peer].first)
            pop(&of->out[peer]);
    }
    free(plans);
    free(of);
    return result;
}

/* --- management ------------------------------------------------------------------------------ */

ncclResult_t control_gather(ncclComm_t comm, const void *mine, void *all, size_t bytes)
{
    char *parts = all;
    size_t got[MAX_RANKS] = {0};
    memcpy(parts + bytes * (size_t)comm->rank, mine, bytes);
    for (int peer = 0; peer < comm->nranks; peer++) /* small: it fits into any socket */
        if (peer != comm->rank &&
            send(comm->sockets[CONTROL][peer], mine, bytes, MSG_NOSIGNAL) != (ssize_t)bytes)
            return lost(comm, peer);
    for (int peer = 0; peer < comm->nranks; peer++)
        while (peer != comm->rank && got[peer] < bytes) {
            if (comm->aborted)
                return ncclInternalError;
            int fd = comm->sockets[CONTROL][peer];
            ssize_t some = recv(fd, parts + bytes * (size_t)peer + got[peer], bytes - got[peer],
                                MSG_DONTWAIT);
            if (some == 0 || (some < 0 && errno != EAGAIN && errno != EINTR))
                return lost(comm, peer);
            struct pollfd waiting = {fd, POLLIN, 0};
            if (some < 0)
                poll(&waiting, 1, POLL_MS);
            else
                got[peer] += (size_t)some;
        }
    return ncclSuccess;
}

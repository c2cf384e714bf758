/*
 * Registered memory, windows, and the one-sided calls on them.
 *
 * A thread of the communicator takes what peers put, as hardware would without the process. A
 * window is known to peers by how many were registered before it, which is the same on all ranks.
 */
#include "nccl_state.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#define MAX_WINDOWS 256
#define MAX_SIGNALS 16
#define MAX_CONTEXTS 8

typedef struct registration {
    struct registration *next;
    ncclComm_t comm;
    void *buffer;
    size_t bytes;
    int window; /* -1: registered without one */
} registration;

typedef struct {
    unsigned long long window, offset, bytes;
    int puts, signal, context;
} put_head;

struct side_state {
    pthread_t thread;
    atomic_bool ends;
    pthread_mutex_t lock;
    registration *windows[MAX_WINDOWS];
    int window_count;
    int arrived[MAX_RANKS][MAX_CONTEXTS][MAX_SIGNALS];
    bool closed[MAX_RANKS];
};

static registration *registrations;
static pthread_mutex_t registrations_lock = PTHREAD_MUTEX_INITIALIZER;

/* --- the thread ------------------------------------------------------------------------------ */

static bool ends(ncclComm_t comm)
{
    return comm->side->ends || comm_stopped(comm);
}

/* All or nothing: false when the peer or this side has gone. */
static bool transfer(ncclComm_t comm, int peer, void *data, size_t bytes, bool out)
{
    int fd = comm->sockets[SIDE][peer];
    for (size_t done = 0; done < bytes && !ends(comm);) {
        char *at = (char *)data + done;
        ssize_t some = out ? send(fd, at, bytes - done, MSG_DONTWAIT | MSG_NOSIGNAL)
                           : recv(fd, at, bytes - done, MSG_DONTWAIT);
        struct pollfd waiting = {fd, out ? POLLOUT : POLLIN, 0};
        if (some > 0)
            done += (size_t)some;
        else if (some == 0 || (errno != EAGAIN && errno != EINTR))
            return false;
        else
            poll(&waiting, 1, POLL_MS);
    }
    return !ends(comm);
}

static bool deliver(ncclComm_t comm, int peer, const put_head *put, const void *data)
{
    side_state *side = comm->side;
    bool good = true;
    pthread_mutex_lock(&side->lock);
    registration *window = put->window < MAX_WINDOWS ? side->windows[put->window] : NULL;
    if (put->puts && put->bytes) {
        char *target = NULL;
        if (window && put->offset + put->bytes <= window->bytes)
            target = double_translate((CUdeviceptr)window->buffer + put->offset, put->bytes);
        if (target)
            memcpy(target, data, put->bytes);
        good = target != NULL;
    }
    side->arrived[peer][put->context][put->signal]++;
    pthread_mutex_unlock(&side->lock);
    return good;
}

static bool take(ncclComm_t comm, int peer)
{
    put_head put;
    if (!transfer(comm, peer, &put, sizeof put, false))
        return false;
    void *data = allocate(put.bytes);
    bool good = transfer(comm, peer, data, put.bytes, false);
    if (good && !deliver(comm, peer, &put, data))
        comm_raise(comm, fail(ncclInvalidUsage, "rank %d put outside of a window of rank %d", peer,
                              comm->rank));
    free(data);
    return good;
}

static void *serve(void *argument)
{
    ncclComm_t comm = argument;
    while (!comm->side->ends && !comm->aborted) {
        struct pollfd fds[MAX_RANKS];
        int peers[MAX_RANKS];
        nfds_t count = 0;
        for (int peer = 0; peer < comm->nranks; peer++)
            if (peer != comm->rank && !comm->side->closed[peer]) {
                peers[count] = peer;
                fds[count++] = (struct pollfd){comm->sockets[SIDE][peer], POLLIN, 0};
            }
        poll(fds, count, 10);
        for (nfds_t i = 0; i < count; i++)
            if (fds[i].revents && !take(comm, peers[i]))
                comm->side->closed[peers[i]] = true;
    }
    return NULL;
}

static side_state *side_of(ncclComm_t comm)
{
    static pthread_mutex_t creating = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&creating);
    if (!comm->side) {
        comm->side = allocate(sizeof *comm->side);
        pthread_mutex_init(&comm->side->lock, NULL);
        if (pthread_create(&comm->side->thread, NULL, serve, comm) != 0)
            abort();
    }
    pthread_mutex_unlock(&creating);
    return comm->side;
}

void side_close(ncclComm_t comm)
{
    if (!comm->side)
        return;
    comm->side->ends = true;
    pthread_join(comm->side->thread, NULL);
}

/* --- calls ----------------------------------------------------------------------------------- */

static ncclResult_t wait_signals(const call *of)
{
    ncclComm_t comm = of->comm;
    side_state *side = side_of(comm);
    for (int i = 0; i < of->awaited_count; i++) {
        const ncclWaitSignalDesc_t *awaited = &of->awaited[i];
        for (bool there = false; !there;) {
            pthread_mutex_lock(&side->lock);
            int *arrived = &side->arrived[awaited->peer][awaited->ctx][awaited->sigIdx];
            there = *arrived >= awaited->opCnt;
            if (there)
                *arrived -= awaited->opCnt;
            bool closed = side->closed[awaited->peer];
            pthread_mutex_unlock(&side->lock);
            if (!there && ends(comm))
                return ncclInProgress;
            if (!there && closed)
                return fail(ncclRemoteError, "rank %d is gone before its signal", awaited->peer);
            if (!there)
                poll(NULL, 0, 1);
        }
    }
    return ncclSuccess;
}

ncclResult_t side_run(const call *of)
{
    if (of->kind == WAIT_SIGNAL)
        return wait_signals(of);
    ncclComm_t comm = of->comm;
    side_of(comm);
    size_t bytes = of->kind == PUT_SIGNAL ? of->count * type_bytes(of->datatype) : 0;
    put_head put = {(unsigned long long)of->window, of->offset, bytes, of->kind == PUT_SIGNAL,
                    of->signal, of->context};
    char *data = bytes ? double_translate((CUdeviceptr)of->send, bytes) : NULL;
    if (bytes && !data)
        return ncclUnhandledCudaError;
    if (of->root == comm->rank)
        return deliver(comm, comm->rank, &put, data)
                   ? ncclSuccess
                   : fail(ncclInvalidUsage, "rank %d put outside of its own window", comm->rank);
    if (transfer(comm, of->root, &put, sizeof put, true) &&
        transfer(comm, of->root, data, bytes, true))
        return ncclSuccess;
    return ends(comm) ? ncclInProgress
                      : fail(ncclRemoteError, "rank %d is gone before a put", of->root);
}

/* --- registration ---------------------------------------------------------------------------- */

static registration *registration_find(ncclComm_t comm, const void *handle)
{
    pthread_mutex_lock(&registrations_lock);
    registration *found = registrations;
    while (found && !(found == handle && found->comm == comm))
        found = found->next;
    pthread_mutex_unlock(&registrations_lock);
    return found;
}

static ncclResult_t registration_new(ncclComm_t comm, void *buffer, size_t bytes,
                                     const char *function, registration **created)
{
    if (bytes == 0 || double_memory_device((CUdeviceptr)buffer, bytes) != comm->device)
        return fail(ncclInvalidArgument, "%s: not memory of device %d", function, comm->device);
    *created = allocate(sizeof **created);
    **created = (registration){NULL, comm, buffer, bytes, -1};
    pthread_mutex_lock(&registrations_lock);
    (*created)->next = registrations;
    registrations = *created;
    pthread_mutex_unlock(&registrations_lock);
    return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t bytes, void **handle)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    TRY(comm_ready(comm, __func__));
    registration *created;
    if (!handle)
        return fail(ncclInvalidArgument, "CommRegister: handle is NULL");
    TRY(registration_new(comm, buffer, bytes, __func__, &created));
    *handle = created;
    return ncclSuccess;
}

/* Entries stay, without an owner, so that a handle is not good twice. */
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    TRY(comm_ready(comm, __func__));
    registration *found = registration_find(comm, handle);
    if (!found || found->window >= 0)
        return fail(ncclInvalidArgument, "CommDeregister: not a live registration");
    found->comm = NULL;
    return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t bytes,
                                    ncclWindow_t *window, int flags)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    TRY(comm_ready(comm, __func__));
    if (!window || flags & ~0xf || (uintptr_t)buffer % NCCL_WIN_REQUIRED_ALIGNMENT)
        return fail(ncclInvalidArgument, "WindowRegister: window, flags or alignment");
    side_state *side = side_of(comm);
    if (side->window_count == MAX_WINDOWS)
        return fail(ncclInvalidUsage, "the double has room for %d windows", MAX_WINDOWS);
    registration *created;
    TRY(registration_new(comm, buffer, bytes, __func__, &created));
    pthread_mutex_lock(&side->lock);
    created->window = side->window_count++;
    side->windows[created->window] = created;
    pthread_mutex_unlock(&side->lock);
    *window = (ncclWindow_t)created;
    /* Collective: afterwards every rank may put. */
    char mine = 1, all[MAX_RANKS];
    return control_gather(comm, &mine, all, 1);
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    TRY(comm_ready(comm, __func__));
    registration *found = registration_find(comm, window);
    if (!found || found->window < 0)
        return fail(ncclInvalidArgument, "WindowDeregister: not a live window");
    pthread_mutex_lock(&comm->side->lock);
    comm->side->windows[found->window] = NULL;
    pthread_mutex_unlock(&comm->side->lock);
    found->comm = NULL;
    return ncclSuccess;
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void **buffer)
{
    ENTER();
    TRY(comm_ready(comm, __func__));
    registration *found = registration_find(comm, window);
    if (!found || found->window < 0 || !buffer)
        return fail(ncclInvalidArgument, "WinGetUserPtr: not a live window");
    *buffer = found->buffer;
    return ncclSuccess;
}

static ncclResult_t check_signal(int signal, int context, unsigned flags)
{
    if (signal < 0 || signal >= MAX_SIGNALS || context < 0 || context >= MAX_CONTEXTS || flags)
        return group_failed(fail(ncclInvalidArgument, "signal %d, context %d or flags %#x", signal,
                                 context, flags));
    return ncclSuccess;
}

ncclResult_t ncclPutSignal(const void *buffer, size_t count, ncclDataType_t datatype, int peer,
                           ncclWindow_t window, size_t offset, int signal, int context,
                           unsigned int flags, ncclComm_t comm, cudaStream_t stream)
{
    ENTER();
    TRY(check_signal(signal, context, flags));
    registration *found = comm ? registration_find(comm, window) : NULL;
    if (!found || found->window < 0 || offset + count * type_bytes(datatype) > found->bytes)
        return group_failed(fail(ncclInvalidArgument, "PutSignal: not inside of a live window"));
    call issued = {.kind = PUT_SIGNAL, .comm = comm, .stream = stream, .send = buffer,
                   .count = count, .datatype = datatype, .root = peer, .window = found->window,
                   .offset = offset, .signal = signal, .context = context};
    return call_issue(&issued, __func__);
}

ncclResult_t ncclSignal(int peer, int signal, int context, unsigned int flags, ncclComm_t comm,
                        cudaStream_t stream)
{
    ENTER();
    TRY(check_signal(signal, context, flags));
    call issued = {.kind = SIGNAL, .comm = comm, .stream = stream, .root = peer, .signal = signal,
                   .context = context};
    return call_issue(&issued, __func__);
}

ncclResult_t ncclWaitSignal(int count, ncclWaitSignalDesc_t *awaited, ncclComm_t comm,
                            cudaStream_t stream)
{
    ENTER();
    if (count < 1 || !awaited)
        return group_failed(fail(ncclInvalidArgument, "WaitSignal: nothing to wait for"));
    TRY(comm_ready(comm, __func__));
    for (int i = 0; i < count; i++) {
        TRY(check_signal(awaited[i].sigIdx, awaited[i].ctx, 0));
        if (awaited[i].peer < 0 || awaited[i].peer >= comm->nranks || awaited[i].opCnt < 0)
            return group_failed(fail(ncclInvalidArgument, "WaitSignal: peer %d", awaited[i].peer));
    }
    call issued = {.kind = WAIT_SIGNAL, .comm = comm, .stream = stream, .awaited_count = count};
    issued.awaited = allocate((size_t)count * sizeof *awaited);
    memcpy(issued.awaited, awaited, (size_t)count * sizeof *awaited);
    return call_issue(&issued, __func__);
}

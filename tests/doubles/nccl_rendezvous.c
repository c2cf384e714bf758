/*
 * Rendezvous: how the ranks of a communicator find each other and connect.
 *
 * Every rank listens on a Unix socket that bears its rank, in a folder that the name of the
 * communicator tells, and connects to the ranks below it. No rank is special, and none has to be
 * there first. A rank that finds the others at odds leaves a file that makes all of them fail.
 */
#include "nccl_state.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

typedef struct {
    unsigned magic;
    int channel, rank, nranks;
    unsigned char uuid[16];
} hello;

#define MAGIC 0xd0b1eu

typedef struct {
    ncclComm_t comm;
    int listener;
    int pending[MAX_RANKS * CHANNELS]; /* accepted, still silent */
    int pending_count;
    bool answered[CHANNELS][MAX_RANKS];
    unsigned char uuids[MAX_RANKS][16];
} meeting;

/* Files that tell of failures stay for late ranks and go with the process. */
static char failures[64][NAME_BYTES];
static atomic_int failure_count;

__attribute__((destructor)) static void forget_failures(void)
{
    for (int i = 0; i < failure_count && i < 64; i++) {
        char path[NAME_BYTES + 16];
        snprintf(path, sizeof path, "%.99s/failed", failures[i]);
        unlink(path);
        rmdir(failures[i]);
    }
}

static ncclResult_t fail_all(ncclComm_t comm, ncclResult_t code, const char *text)
{
    char path[NAME_BYTES + 16], partial[NAME_BYTES + 32];
    snprintf(path, sizeof path, "%s/failed", comm->name);
    snprintf(partial, sizeof partial, "%s/failed-%d", comm->name, comm->rank);
    FILE *file = fopen(partial, "w");
    if (file) {
        fprintf(file, "%d %s", (int)code, text);
        fclose(file);
        rename(partial, path);
    }
    int index = failure_count++;
    if (index < 64)
        memcpy(failures[index], comm->name, sizeof comm->name);
    return fail(code, "%s", text);
}

static ncclResult_t failure_of_others(ncclComm_t comm)
{
    char path[NAME_BYTES + 16], text[512] = "";
    int code = ncclSuccess;
    snprintf(path, sizeof path, "%s/failed", comm->name);
    FILE *file = fopen(path, "r");
    if (!file)
        return ncclSuccess;
    if (fscanf(file, "%d %511[^\n]", &code, text) < 1)
        code = ncclInternalError;
    fclose(file);
    return fail((ncclResult_t)code, "%s", text);
}

static struct sockaddr_un address_of(ncclComm_t comm, int rank)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s/%d", comm->name, rank);
    return address;
}

static void quick_socket(int fd)
{
    int bytes = 1 << 20;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    fcntl(fd, F_SETFL, O_NONBLOCK);
}

static hello my_hello(ncclComm_t comm, int channel)
{
    hello said = {MAGIC, channel, comm->rank, comm->nranks, {0}};
    memcpy(said.uuid, comm->uuid, sizeof said.uuid);
    return said;
}

static ncclResult_t greeted(meeting *at, const hello *said)
{
    char text[256];
    if (said->nranks == at->comm->nranks) {
        memcpy(at->uuids[said->rank], said->uuid, sizeof said->uuid);
        return ncclSuccess;
    }
    snprintf(text, sizeof text, "rank %d expects %d ranks, rank %d expects %d", said->rank,
             said->nranks, at->comm->rank, at->comm->nranks);
    return fail_all(at->comm, ncclInvalidArgument, text);
}

static ncclResult_t connect_below(meeting *at)
{
    ncclComm_t comm = at->comm;
    for (int rank = 0; rank < comm->rank; rank++)
        for (int channel = 0; channel < CHANNELS; channel++) {
            int *fd = &comm->sockets[channel][rank];
            hello said = my_hello(comm, channel);
            if (*fd < 0) {
                struct sockaddr_un address = address_of(comm, rank);
                int connected = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
                if (connect(connected, (struct sockaddr *)&address, sizeof address) != 0 ||
                    send(connected, &said, sizeof said, MSG_NOSIGNAL) != sizeof said) {
                    close(connected); /* it is not there yet */
                    return ncclSuccess;
                }
                quick_socket(connected);
                *fd = connected;
            }
            if (!at->answered[channel][rank]) {
                ssize_t got = recv(*fd, &said, sizeof said, MSG_DONTWAIT);
                if (got == 0 || (got < 0 && errno != EAGAIN)) {
                    close(*fd);
                    *fd = -1;
                } else if (got == sizeof said) {
                    at->answered[channel][rank] = true;
                    TRY(greeted(at, &said));
                }
            }
        }
    return ncclSuccess;
}

static ncclResult_t accept_above(meeting *at)
{
    ncclComm_t comm = at->comm;
    int accepted;
    while (at->pending_count < MAX_RANKS * CHANNELS &&
           (accepted = accept4(at->listener, NULL, NULL, SOCK_CLOEXEC)) >= 0)
        at->pending[at->pending_count++] = accepted;
    for (int i = at->pending_count; i-- > 0;) {
        hello said;
        ssize_t got = recv(at->pending[i], &said, sizeof said, MSG_DONTWAIT);
        if (got < 0 && errno == EAGAIN)
            continue;
        int fd = at->pending[i];
        at->pending[i] = at->pending[--at->pending_count];
        if (got != sizeof said || said.magic != MAGIC || said.rank <= comm->rank ||
            said.rank >= MAX_RANKS || said.channel < 0 || said.channel >= CHANNELS) {
            close(fd);
            continue;
        }
        hello answer = my_hello(comm, said.channel);
        if (send(fd, &answer, sizeof answer, MSG_NOSIGNAL) != sizeof answer) {
            close(fd);
            continue;
        }
        if (greeted(at, &said) != ncclSuccess) {
            close(fd);
            return ncclInvalidArgument;
        }
        quick_socket(fd);
        if (comm->sockets[said.channel][said.rank] >= 0)
            close(comm->sockets[said.channel][said.rank]); /* the peer tried again */
        comm->sockets[said.channel][said.rank] = fd;
        at->answered[said.channel][said.rank] = true;
    }
    return ncclSuccess;
}

static bool complete(const meeting *at)
{
    for (int rank = 0; rank < at->comm->nranks; rank++)
        for (int channel = 0; channel < CHANNELS; channel++)
            if (rank != at->comm->rank && !at->answered[channel][rank])
                return false;
    return true;
}

static ncclResult_t check_devices(const meeting *at)
{
    const char *allowed = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (allowed && atoi(allowed) == 1)
        return ncclSuccess;
    for (int i = 0; i < at->comm->nranks; i++)
        for (int j = i + 1; j < at->comm->nranks; j++)
            if (memcmp(at->uuids[i], at->uuids[j], 16) == 0)
                return fail(ncclInvalidUsage,
                            "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x",
                            i, j, 0x1000 * (0x10 + at->uuids[i][7]));
    return ncclSuccess;
}

static ncclResult_t meet(meeting *at)
{
    ncclComm_t comm = at->comm;
    while (!complete(at)) {
        if (comm_aborted(comm))
            return ncclInternalError;
        TRY(failure_of_others(comm));
        TRY(connect_below(at));
        TRY(accept_above(at));
        struct pollfd listening = {at->listener, POLLIN, 0};
        if (!complete(at))
            poll(&listening, 1, POLL_MS);
    }
    return check_devices(at);
}

ncclResult_t rendezvous(ncclComm_t comm)
{
    if (comm->nranks == 1)
        return ncclSuccess;
    meeting *at = allocate(sizeof *at);
    at->comm = comm;
    memcpy(at->uuids[comm->rank], comm->uuid, sizeof comm->uuid);
    ncclResult_t result = ncclSuccess;
    struct sockaddr_un address = address_of(comm, comm->rank);
    at->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int bound;
    do { /* the folder may go between the two: another rank that gave up removes it */
        mkdir(comm->name, 0700);
        bound = bind(at->listener, (struct sockaddr *)&address, sizeof address);
    } while (bound != 0 && errno == ENOENT && !comm_aborted(comm));
    if (bound != 0 && errno == EADDRINUSE)
        result = fail_all(comm, ncclInvalidUsage, "two processes claim one rank");
    else if (bound != 0 || listen(at->listener, 4 * MAX_RANKS) != 0)
        result = fail(ncclSystemError, "no socket at %s: %s", address.sun_path, strerror(errno));
    if (result == ncclSuccess) {
        result = meet(at);
        unlink(address.sun_path);
    }
    close(at->listener);
    for (int i = 0; i < at->pending_count; i++)
        close(at->pending[i]);
    rmdir(comm->name); /* succeeds for the last rank */
    free(at);
    return result;
}

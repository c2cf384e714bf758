/* The state of the double of libnccl: communicators, their sockets, and calls on their way. */
#ifndef PYCOMM_DOUBLE_NCCL_STATE_H
#define PYCOMM_DOUBLE_NCCL_STATE_H

#include "double.h"

/* nccl.h wants the types of these headers by name only, and they need more than the wheels have. */
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define NCCL_OS_LINUX /* else it leaves out a function */

#pragma GCC visibility push(default)
#include <nccl.h>

/* --- for tests ------------------------------------------------------------------------------- */

/* Raises an asynchronous error now; operations that run end. */
void double_async_error(ncclComm_t comm, int code);
/* Operations of this rank are enqueued but make no progress until it is aborted, or 0 is given. */
void double_mute(ncclComm_t comm, int on);
/* ncclCommDestroy and ncclCommFinalize take that long. */
void double_slow_destroy(unsigned seconds);
/* ncclCommAbort takes that long. */
void double_stall_abort(unsigned seconds);
/* Uses that the library does not allow, and the text of the last. */
unsigned long long double_misuse(void);
const char *double_last_misuse(void);
#pragma GCC visibility pop

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef DOUBLE_NCCL_VERSION
#define DOUBLE_NCCL_VERSION NCCL_VERSION_CODE
#endif

#define MAX_RANKS 64
#define MAX_OPERATORS 64
#define NAME_BYTES 100
#define POLL_MS 2 /* how soon whatever waits sees an abort */

enum { DATA, CONTROL, SIDE, CHANNELS }; /* sockets between two ranks */

typedef struct {
    bool used;
    ncclDataType_t datatype;
    const void *device_scalar; /* NULL: the value is here */
    unsigned char scalar[8];
} operator_state;

typedef struct group_calls group_calls;
typedef struct side_state side_state;

struct ncclComm {
    struct ncclComm *next; /* never freed, so that a stale handle is known as one */
    char name[NAME_BYTES]; /* the folder of the sockets of the rendezvous */
    int nranks, rank, device;
    unsigned char uuid[16];
    bool blocking;
    atomic_bool dead, aborted, revoked, finalised, suspended, muted;
    atomic_int async;   /* ncclResult_t */
    atomic_int running; /* operations, and threads that join, split or finalise */
    atomic_int entered; /* calls on it, of which there may be one */
    int sockets[CHANNELS][MAX_RANKS];
    double_order order;
    unsigned splits, shrinks;
    operator_state operators[MAX_OPERATORS];
    group_calls *deferred; /* launched when the caller has polled for it */
    int polls_left;
    side_state *side;
    struct ncclComm *_Atomic parent; /* while it is being made from that one */
    bool grow_pending;
};

typedef enum {
    ALL_REDUCE,
    BROADCAST,
    REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_TO_ALL,
    GATHER,
    SCATTER,
    SEND,
    RECEIVE,
    PUT_SIGNAL,
    SIGNAL,
    WAIT_SIGNAL,
} call_kind;

typedef struct {
    call_kind kind;
    ncclComm_t comm;
    cudaStream_t stream;
    const void *send;
    void *receive;
    size_t count;
    ncclDataType_t datatype;
    int op;          /* of ncclRedOp_t */
    int root;        /* or the peer */
    operator_state operator; /* when op is one that was created */
    int window;      /* one-sided calls */
    size_t offset;
    int signal, context;
    ncclWaitSignalDesc_t *awaited;
    int awaited_count;
} call;

struct group_calls {
    ncclComm_t comm;
    size_t count;
    call calls[];
};

/* --- nccl_misc.c ----------------------------------------------------------------------------- */

/* Keeps the text for ncclGetLastError and returns the code. */
ncclResult_t fail(ncclResult_t code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
ncclResult_t cuda_failure(CUresult error);
size_t type_bytes(ncclDataType_t datatype);
void *allocate(size_t bytes);

#define ENTER()                                                                \
    do {                                                                       \
        int code_ = double_called(__func__);                                   \
        if (code_ != 0)                                                        \
            return fail((ncclResult_t)code_, "a test made %s fail", __func__); \
    } while (0)
#define TRY(expression)                                                        \
    do {                                                                       \
        ncclResult_t tried_ = (expression);                                    \
        if (tried_ != ncclSuccess)                                             \
            return tried_;                                                     \
    } while (0)

/* --- nccl_comm.c ----------------------------------------------------------------------------- */

ncclComm_t comm_new(int nranks, int rank, const char *name, int device, bool blocking);
bool comm_live(ncclComm_t comm);
/* Whether operations of it shall end. */
bool comm_stopped(ncclComm_t comm);
void comm_raise(ncclComm_t comm, ncclResult_t code);
/* Live, initialised, without error; `function` is for the texts. */
ncclResult_t comm_ready(ncclComm_t comm, const char *function);
void comm_close(ncclComm_t comm);
/* Counts as the one call at a time that a communicator may see; for __attribute__((cleanup)). */
ncclComm_t comm_enter(ncclComm_t comm, const char *function);
void comm_leave(ncclComm_t *comm);
#define ONE_AT_A_TIME(comm)                                                    \
    __attribute__((cleanup(comm_leave))) ncclComm_t entered_ = comm_enter(comm, __func__)
ncclResult_t config_blocking(const ncclConfig_t *config, bool inherited, bool *blocking);
/* Runs in a thread of its own, counted as running. */
ncclResult_t comm_thread(ncclComm_t comm, void *(*run)(void *), void *argument);
/* Whether this communicator, or the one that it is made from, was aborted. */
bool comm_aborted(ncclComm_t comm);
void new_name(char name[NAME_BYTES], unsigned long long token);
unsigned long long derived_token(const char *name, const char *how, unsigned number, int color);

/* --- nccl_rendezvous.c ----------------------------------------------------------------------- */

ncclResult_t rendezvous(ncclComm_t comm);

/* --- nccl_exchange.c ------------------------------------------------------------------------- */

/* Runs calls of one communicator over its sockets. */
ncclResult_t exchange(const group_calls *group);
/* Every rank gives `bytes` and gets those of all, over the sockets for management. */
ncclResult_t control_gather(ncclComm_t comm, const void *mine, void *all, size_t bytes);
const char *call_name(call_kind kind);
/* How many bytes a call reads and writes on this rank. */
void call_spans(const call *of, size_t *reads, size_t *writes);

/* --- nccl_reduce.c --------------------------------------------------------------------------- */

/* Reduces in the order of ranks into `result`, which may be one of the inputs. */
void reduce(const call *of, void *result, void *const *inputs, int nranks, size_t count,
            unsigned char (*scalars)[8]);

/* --- nccl_group.c ---------------------------------------------------------------------------- */

ncclResult_t group_add(const call *added);
bool group_open(void);
/* Runs at the end of the group, beside the other jobs; `cancel` when the group fails before. */
ncclResult_t group_add_job(ncclResult_t (*run)(void *), void (*cancel)(void *), void *argument);
ncclResult_t group_failed(ncclResult_t code);
ncclResult_t call_issue(call *of, const char *function); /* checks, then adds to the group */
ncclResult_t launch_deferred(ncclComm_t comm);
void drop_deferred(ncclComm_t comm);

/* --- nccl_side.c ----------------------------------------------------------------------------- */

ncclResult_t side_run(const call *of);
void side_close(ncclComm_t comm);

#endif

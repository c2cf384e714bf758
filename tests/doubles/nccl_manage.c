/* Communicators from communicators, and what can be done to one: split, shrink, grow, revoke,
 * suspend, register. */
#include "nccl_state.h"

#include <time.h>

typedef enum { SPLIT, SHRINK, GROW } how_derived;

/* One rank's part in making a communicator from another. */
typedef struct {
    how_derived how;
    ncclComm_t parent;
    ncclComm_t *result;
    bool blocking; /* of the child */
    int color, key, nranks, rank;
    char name[NAME_BYTES];
} derivation;

typedef struct {
    int color, key, rank;
} split_choice;

static int by_key(const void *left, const void *right)
{
    const split_choice *a = left, *b = right;
    if (a->key != b->key)
        return a->key < b->key ? -1 : 1;
    return a->rank - b->rank;
}

static ncclResult_t choose_split(derivation *of)
{
    ncclComm_t parent = of->parent;
    split_choice mine = {of->color, of->key, parent->rank}, all[MAX_RANKS];
    TRY(control_gather(parent, &mine, all, sizeof mine));
    qsort(all, (size_t)parent->nranks, sizeof *all, by_key);
    of->nranks = 0;
    for (int i = 0; i < parent->nranks; i++)
        if (all[i].color == of->color) {
            if (all[i].rank == parent->rank)
                of->rank = of->nranks;
            of->nranks++;
        }
    return ncclSuccess;
}

/* The one rank that has the id tells the others. */
static ncclResult_t choose_grow(derivation *of)
{
    char names[MAX_RANKS][NAME_BYTES];
    TRY(control_gather(of->parent, of->name, names, NAME_BYTES));
    for (int i = 0; i < of->parent->nranks; i++)
        if (names[i][0])
            memcpy(of->name, names[i], NAME_BYTES);
    if (!of->name[0])
        return fail(ncclInvalidArgument, "CommGrow: no rank gave a uniqueId");
    return ncclSuccess;
}

static ncclResult_t derive(derivation *of)
{
    ncclComm_t parent = of->parent;
    if (of->how == SPLIT)
        TRY(choose_split(of));
    if (of->how == GROW)
        TRY(choose_grow(of));
    if (of->how == SPLIT && of->color == NCCL_SPLIT_NOCOLOR)
        return ncclSuccess;
    ncclComm_t child = comm_new(of->nranks, of->rank, of->name, parent->device, of->blocking);
    child->parent = parent; /* its abort ends the rendezvous too */
    ncclResult_t result = rendezvous(child);
    child->parent = NULL;
    if (result != ncclSuccess) {
        comm_close(child);
        return result;
    }
    child->async = ncclSuccess;
    *of->result = child;
    return ncclSuccess;
}

static void *derive_in_thread(void *argument)
{
    derivation *of = argument;
    ncclComm_t parent = of->parent;
    ncclResult_t result = derive(of);
    if (result != ncclSuccess)
        comm_raise(parent, result);
    atomic_compare_exchange_strong(&parent->async, &(int){ncclInProgress}, ncclSuccess);
    free(of);
    parent->running--;
    return NULL;
}

/* As in the library, a parent that does not block is in progress until the child is there, and the
 * handle of the child is written no sooner. */
static ncclResult_t run_derivation(void *argument)
{
    derivation *of = argument;
    ncclComm_t parent = of->parent;
    if (!parent->blocking) {
        parent->async = ncclInProgress;
        TRY(comm_thread(parent, derive_in_thread, of));
        return ncclInProgress;
    }
    parent->running++;
    ncclResult_t result = derive(of);
    parent->running--;
    free(of);
    return result;
}

static ncclResult_t start_derivation(const derivation *asked)
{
    derivation *of = allocate(sizeof *of);
    *of = *asked;
    *of->result = NULL;
    return group_open() ? group_add_job(run_derivation, free, of) : run_derivation(of);
}

static ncclResult_t check_parent(ncclComm_t comm, ncclComm_t *result, const char *function)
{
    TRY(comm_ready(comm, function));
    if (!result)
        return fail(ncclInvalidArgument, "%s: newcomm is NULL", function);
    if (comm->finalised || comm->suspended)
        return fail(ncclInvalidUsage, "%s: the communicator is finalized or suspended", function);
    return ncclSuccess;
}

static void pause_ms(long milliseconds)
{
    nanosleep(&(struct timespec){0, milliseconds * 1000000}, NULL);
}

/* Ends what runs on a communicator. */
static void stop(ncclComm_t comm)
{
    comm->revoked = true;
    for (int waited = 0; comm->running > 0 && waited < 1500; waited++)
        pause_ms(1);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *result,
                           ncclConfig_t *config)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    TRY(check_parent(comm, result, __func__));
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
        return fail(ncclInvalidArgument, "CommSplit: color %d is negative", color);
    derivation of = {.how = SPLIT, .parent = comm, .result = result, .color = color, .key = key};
    TRY(config_blocking(config, comm->blocking, &of.blocking));
    new_name(of.name, derived_token(comm->name, "split", comm->splits++, color));
    return start_derivation(&of);
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int count, ncclComm_t *result,
                            ncclConfig_t *config, int flags)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    bool aborts = flags & NCCL_SHRINK_ABORT;
    if (!aborts || !comm_live(comm) || comm->async == ncclInProgress)
        TRY(check_parent(comm, result, __func__));
    if (!result || !excluded || count < 1 || count >= comm->nranks || flags & ~NCCL_SHRINK_ABORT)
        return fail(ncclInvalidArgument, "CommShrink: %d ranks of %d to exclude", count,
                    comm->nranks);
    derivation of = {.how = SHRINK, .parent = comm, .result = result, .rank = comm->rank};
    bool gone[MAX_RANKS] = {false};
    int mask = 0;
    of.nranks = comm->nranks;
    for (int i = 0; i < count; i++) {
        int rank = excluded[i];
        if (rank < 0 || rank >= comm->nranks || gone[rank] || rank == comm->rank)
            return fail(ncclInvalidArgument, "CommShrink: rank %d cannot be excluded", rank);
        gone[rank] = true;
        mask = mask * 31 + rank + 1;
        of.nranks--;
        of.rank -= rank < comm->rank;
    }
    TRY(config_blocking(config, comm->blocking, &of.blocking));
    if (aborts)
        stop(comm);
    new_name(of.name, derived_token(comm->name, "shrink", comm->shrinks++, mask));
    return start_derivation(&of);
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags)
{
    ENTER();
    if (!comm_live(comm))
        return comm_ready(comm, __func__);
    if (flags != NCCL_REVOKE_DEFAULT)
        return fail(ncclInvalidArgument, "CommRevoke: flags must be NCCL_REVOKE_DEFAULT");
    if (comm->revoked) {
        misuse("ncclCommRevoke twice");
        return fail(ncclInvalidUsage, "CommRevoke: already revoked");
    }
    stop(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *id)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    TRY(comm_ready(comm, __func__));
    if (comm->grow_pending)
        return fail(ncclInvalidUsage, "CommGetUniqueId: the last id is not consumed yet");
    TRY(ncclGetUniqueId(id));
    comm->grow_pending = true;
    return ncclSuccess;
}

ncclResult_t ncclCommGrow(ncclComm_t comm, int nranks, const ncclUniqueId *id, int rank,
                          ncclComm_t *result, ncclConfig_t *config)
{
    ENTER();
    if (!comm) {
        if (!id)
            return fail(ncclInvalidArgument, "CommGrow: a new rank needs the uniqueId");
        return ncclCommInitRankConfig(result, nranks, *id, rank, config);
    }
    ONE_AT_A_TIME(comm);
    TRY(check_parent(comm, result, __func__));
    if (rank != -1 || nranks <= comm->nranks || nranks > MAX_RANKS)
        return fail(ncclInvalidArgument, "CommGrow: from %d to %d ranks as rank %d", comm->nranks,
                    nranks, rank);
    derivation of = {.how = GROW, .parent = comm, .result = result, .rank = comm->rank};
    of.nranks = nranks;
    if (id)
        memcpy(of.name, id->internal, NAME_BYTES);
    TRY(config_blocking(config, comm->blocking, &of.blocking));
    comm->grow_pending = false;
    return start_derivation(&of);
}

/* --- memory of the communicator, of which the double has none -------------------------------- */

ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    TRY(comm_ready(comm, __func__));
    if (flags != NCCL_SUSPEND_MEM)
        return fail(ncclInvalidArgument, "CommSuspend: flags must be NCCL_SUSPEND_MEM");
    if (comm->suspended)
        return fail(ncclInvalidUsage, "CommSuspend: already suspended");
    double_order_wait(&comm->order);
    comm->suspended = true;
    return ncclSuccess;
}

ncclResult_t ncclCommResume(ncclComm_t comm)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    TRY(comm_ready(comm, __func__));
    if (!comm->suspended)
        return fail(ncclInvalidUsage, "CommResume: not suspended");
    comm->suspended = false;
    return ncclSuccess;
}

ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value)
{
    ENTER();
    TRY(comm_ready(comm, __func__));
    if (!value || (unsigned)stat > ncclStatGpuMemTotal)
        return fail(ncclInvalidArgument, "CommMemStats: no such statistic");
    *value = stat == ncclStatGpuMemSuspended ? comm->suspended : 0;
    return ncclSuccess;
}

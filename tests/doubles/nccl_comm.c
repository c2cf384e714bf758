/* The life of a communicator: initialisation, errors, finalising, destroying, aborting. */
#include "nccl_state.h"

#include <sys/random.h>
#include <time.h>
#include <unistd.h>

static ncclComm_t comms;
static pthread_mutex_t comms_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint slow_destroy, stall_abort;

void double_slow_destroy(unsigned seconds)
{
    slow_destroy = seconds;
}

void double_stall_abort(unsigned seconds)
{
    stall_abort = seconds;
}

void double_mute(ncclComm_t comm, int on)
{
    if (comm_live(comm))
        comm->muted = on != 0;
}

void double_async_error(ncclComm_t comm, int code)
{
    if (!comm_live(comm))
        return;
    fail((ncclResult_t)code, "a test raised this error");
    comm->async = code;
}

/* --- state ----------------------------------------------------------------------------------- */

ncclComm_t comm_new(int nranks, int rank, const char *name, int device, bool blocking)
{
    ncclComm_t created = allocate(sizeof *created);
    created->nranks = nranks;
    created->rank = rank;
    created->device = device;
    created->blocking = blocking;
    snprintf(created->name, sizeof created->name, "%s", name);
    double_device_uuid(device, created->uuid);
    for (int channel = 0; channel < CHANNELS; channel++)
        for (int peer = 0; peer < MAX_RANKS; peer++)
            created->sockets[channel][peer] = -1;
    created->async = ncclInProgress;
    pthread_mutex_lock(&comms_lock);
    created->next = comms;
    comms = created;
    pthread_mutex_unlock(&comms_lock);
    return created;
}

bool comm_live(ncclComm_t comm)
{
    pthread_mutex_lock(&comms_lock);
    ncclComm_t known = comms;
    while (known && known != comm)
        known = known->next;
    pthread_mutex_unlock(&comms_lock);
    return known && !known->dead;
}

bool comm_aborted(ncclComm_t comm)
{
    ncclComm_t parent = comm->parent;
    return comm->aborted || (parent && parent->aborted);
}

bool comm_stopped(ncclComm_t comm)
{
    int async = comm->async;
    return comm->aborted || comm->revoked || (async != ncclSuccess && async != ncclInProgress);
}

/* The first error stays. */
void comm_raise(ncclComm_t comm, ncclResult_t code)
{
    int before = comm->async;
    while (before == ncclSuccess || before == ncclInProgress)
        if (atomic_compare_exchange_weak(&comm->async, &before, code))
            break;
}

ncclResult_t comm_ready(ncclComm_t comm, const char *function)
{
    if (!comm)
        return fail(ncclInvalidArgument, "%s: comm argument is NULL", function);
    if (!comm_live(comm)) {
        misuse("%s on a communicator that is destroyed, aborted or unknown", function);
        return fail(ncclInvalidArgument, "%s: comm is not a live communicator", function);
    }
    int async = comm->async;
    if (async == ncclInProgress) {
        misuse("%s while an operation on the communicator is in progress", function);
        return fail(ncclInvalidArgument,
                    "Attempt to use communicator before the previous operation returned "
                    "ncclSuccess");
    }
    return (ncclResult_t)async;
}

ncclComm_t comm_enter(ncclComm_t comm, const char *function)
{
    if (!comm_live(comm))
        return NULL;
    if (atomic_fetch_add(&comm->entered, 1) > 0)
        misuse("%s while another thread is in a call on the communicator", function);
    return comm;
}

void comm_leave(ncclComm_t *comm)
{
    if (*comm)
        (*comm)->entered--;
}

static void pause_ms(unsigned milliseconds)
{
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

void comm_close(ncclComm_t comm)
{
    comm->dead = true;
    side_close(comm);
    drop_deferred(comm);
    for (int channel = 0; channel < CHANNELS; channel++)
        for (int peer = 0; peer < MAX_RANKS; peer++)
            if (comm->sockets[channel][peer] >= 0) {
                close(comm->sockets[channel][peer]);
                comm->sockets[channel][peer] = -1;
            }
}

ncclResult_t comm_thread(ncclComm_t comm, void *(*run)(void *), void *argument)
{
    pthread_t thread;
    comm->running++;
    if (pthread_create(&thread, NULL, run, argument) != 0) {
        comm->running--;
        return fail(ncclSystemError, "no thread");
    }
    pthread_detach(thread);
    return ncclSuccess;
}

/* --- initialisation -------------------------------------------------------------------------- */

/* FNV; only to give communicators names of their own. */
static unsigned long long hash(unsigned long long state, const void *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        state = (state ^ ((const unsigned char *)bytes)[i]) * 1099511628211ull;
    return state;
}

unsigned long long derived_token(const char *name, const char *how, unsigned number, int color)
{
    unsigned long long state = hash(1469598103934665603ull, name, strlen(name));
    state = hash(state, how, strlen(how));
    state = hash(state, &number, sizeof number);
    return hash(state, &color, sizeof color);
}

void new_name(char name[NAME_BYTES], unsigned long long token)
{
    const char *place = getenv("TMPDIR");
    if (!place || !*place || strlen(place) > 60) /* the address of a Unix socket is short */
        place = "/tmp";
    snprintf(name, NAME_BYTES, "%s/pycomm-double-%016llx", place, token);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    ENTER();
    unsigned long long token = 0;
    if (!id)
        return fail(ncclInvalidArgument, "GetUniqueId: uniqueId is NULL");
    if (getrandom(&token, sizeof token, 0) != sizeof token)
        return fail(ncclSystemError, "no random bytes");
    memset(id->internal, 0, sizeof id->internal);
    new_name(id->internal, token);
    return ncclSuccess;
}

ncclResult_t config_blocking(const ncclConfig_t *config, bool inherited, bool *blocking)
{
    *blocking = inherited;
    if (!config)
        return ncclSuccess;
    if (config->magic != NCCL_API_MAGIC)
        return fail(ncclInvalidArgument, "ncclConfig_t argument not initialized via "
                                         "NCCL_CONFIG_INITIALIZER");
    if (config->size < offsetof(ncclConfig_t, cgaClusterSize) || config->size > 4096)
        return fail(ncclInvalidArgument, "ncclConfig_t argument of an impossible size");
    if (config->blocking != NCCL_CONFIG_UNDEF_INT) {
        if (config->blocking != 0 && config->blocking != 1)
            return fail(ncclInvalidArgument, "Invalid config blocking attribute value %d",
                        config->blocking);
        *blocking = config->blocking != 0;
    }
    return ncclSuccess;
}

static ncclResult_t join(ncclComm_t comm)
{
    ncclResult_t result = rendezvous(comm);
    if (result == ncclSuccess)
        atomic_compare_exchange_strong(&comm->async, &(int){ncclInProgress}, ncclSuccess);
    else
        comm_raise(comm, result);
    return (ncclResult_t)comm->async;
}

static void *join_in_thread(void *argument)
{
    ncclComm_t comm = argument;
    join(comm);
    comm->running--;
    return NULL;
}

typedef struct {
    ncclComm_t comm;
    ncclComm_t *result;
} beginning;

static ncclResult_t begin(void *argument)
{
    beginning of = *(beginning *)argument;
    free(argument);
    if (!of.comm->blocking) {
        TRY(comm_thread(of.comm, join_in_thread, of.comm));
        return ncclInProgress;
    }
    of.comm->running++;
    ncclResult_t joined = join(of.comm);
    of.comm->running--;
    if (joined != ncclSuccess) {
        *of.result = NULL;
        if (!of.comm->aborted)
            comm_close(of.comm);
    }
    return joined;
}

static void forget(void *argument)
{
    beginning *of = argument;
    *of->result = NULL;
    comm_close(of->comm);
    free(of);
}

static ncclResult_t init(const char *function, ncclComm_t *result, int nranks,
                         const ncclUniqueId *id, int rank, int device, const ncclConfig_t *config)
{
    bool blocking;
    TRY(config_blocking(config, true, &blocking));
    if (!result)
        return fail(ncclInvalidArgument, "%s: comm is NULL", function);
    if (nranks < 1 || nranks > MAX_RANKS || rank < 0 || rank >= nranks)
        return fail(ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, nranks);
    if (device < 0)
        return fail(ncclInvalidArgument, "%s: no current context", function);
    if (!memchr(id->internal, 0, NAME_BYTES) || !strstr(id->internal, "/pycomm-double-"))
        return fail(ncclInvalidArgument, "%s: not an id of ncclGetUniqueId", function);
    beginning *of = allocate(sizeof *of);
    of->comm = comm_new(nranks, rank, id->internal, device, blocking);
    of->result = result;
    *result = of->comm; /* early, so that another thread can abort a start that hangs */
    return group_open() ? group_add_job(begin, forget, of) : begin(of);
}

static ncclResult_t init_here(const char *function, ncclComm_t *result, int nranks,
                              const ncclUniqueId *id, int rank, const ncclConfig_t *config)
{
    ncclResult_t code =
        init(function, result, nranks, id, rank, double_current_device(), config);
    return code == ncclSuccess || code == ncclInProgress ? code : group_failed(code);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank)
{
    ENTER();
    return init_here(__func__, comm, nranks, &id, rank, NULL);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    ENTER();
    return init_here(__func__, comm, nranks, &id, rank, config);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank, int count,
                                      ncclUniqueId *ids, ncclConfig_t *config)
{
    ENTER();
    if (!ids || count < 1 || count > nranks)
        return group_failed(fail(ncclInvalidArgument, "%s: %d ids for %d ranks", __func__, count,
                                 nranks));
    return init_here(__func__, comm, nranks, &ids[0], rank, config);
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms_out, int count, const int *ordinals)
{
    ENTER();
    ncclUniqueId id;
    if (!comms_out || count < 1 || group_open())
        return fail(ncclInvalidArgument, "Invalid device count requested : %d", count);
    TRY(ncclGetUniqueId(&id));
    TRY(ncclGroupStart());
    for (int rank = 0; rank < count; rank++) {
        unsigned char uuid[16];
        int ordinal = ordinals ? ordinals[rank] : rank;
        ncclResult_t code = ncclInvalidArgument;
        if (double_device_uuid(ordinal, uuid) == CUDA_SUCCESS)
            code = init(__func__, &comms_out[rank], count, &id, rank, ordinal, NULL);
        if (code != ncclSuccess)
            group_failed(fail(code, "Invalid device %d", ordinal));
    }
    return ncclGroupEnd();
}

/* --- the end --------------------------------------------------------------------------------- */

static void drain(ncclComm_t comm)
{
    pause_ms(slow_destroy * 1000);
    double_order_wait(&comm->order);
}

static void *finalise_in_thread(void *argument)
{
    ncclComm_t comm = argument;
    drain(comm);
    atomic_compare_exchange_strong(&comm->async, &(int){ncclInProgress}, ncclSuccess);
    comm->running--;
    return NULL;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    TRY(comm_ready(comm, __func__));
    if (comm->revoked) {
        misuse("ncclCommFinalize after ncclCommRevoke");
        return fail(ncclInvalidUsage, "CommFinalize: the communicator is revoked");
    }
    if (comm->finalised) {
        misuse("ncclCommFinalize twice");
        return fail(ncclInvalidArgument, "CommFinalize: already finalized");
    }
    comm->finalised = true;
    if (!comm->blocking) {
        comm->async = ncclInProgress;
        TRY(comm_thread(comm, finalise_in_thread, comm));
        return ncclInProgress;
    }
    drain(comm);
    return (ncclResult_t)comm->async;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    ENTER();
    ONE_AT_A_TIME(comm);
    if (!comm)
        return ncclSuccess;
    if (!comm_live(comm) || comm->async == ncclInProgress)
        return comm_ready(comm, __func__);
    drain(comm);
    if (!comm->dead) /* another thread may have aborted meanwhile */
        comm_close(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    ENTER();
    if (!comm)
        return ncclSuccess;
    if (!comm_live(comm)) {
        misuse("ncclCommAbort on a communicator that is destroyed, aborted or unknown");
        return fail(ncclInvalidArgument, "CommAbort: comm is not a live communicator");
    }
    comm->aborted = true;
    pause_ms(stall_abort * 1000);
    for (int waited = 0; comm->running > 0 && waited < 1500; waited++)
        pause_ms(1);
    comm_close(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *async)
{
    ENTER();
    if (!comm_live(comm) || !async) {
        if (comm && async)
            misuse("ncclCommGetAsyncError on a communicator that is not live");
        return fail(ncclInvalidArgument, "CommGetAsyncError: comm or result is not valid");
    }
    if (comm->deferred && comm->polls_left-- <= 0)
        launch_deferred(comm);
    *async = (ncclResult_t)comm->async;
    return ncclSuccess;
}

#define GETTER(function, field)                                                \
    ncclResult_t function(const ncclComm_t comm, int *value)                   \
    {                                                                          \
        ENTER();                                                               \
        TRY(comm_ready(comm, __func__));                                       \
        if (!value)                                                            \
            return fail(ncclInvalidArgument, #function ": no place");          \
        *value = comm->field;                                                  \
        return ncclSuccess;                                                    \
    }
GETTER(ncclCommCount, nranks)
GETTER(ncclCommCuDevice, device)
GETTER(ncclCommUserRank, rank)

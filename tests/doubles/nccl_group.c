/* Groups: what is called between ncclGroupStart and the last ncclGroupEnd is issued there. */
#include "nccl_state.h"

typedef struct {
    ncclResult_t (*run)(void *);
    void (*cancel)(void *);
    void *argument;
    ncclResult_t code;
} job;

static _Thread_local struct {
    int depth;
    ncclResult_t failed;
    call *calls;
    size_t call_count;
    job *jobs;
    size_t job_count;
} group;

bool group_open(void)
{
    return group.depth > 0;
}

/* The group as a whole fails with the first error of a call in it. */
ncclResult_t group_failed(ncclResult_t code)
{
    if (group.depth > 0 && group.failed == ncclSuccess)
        group.failed = code;
    return code;
}

ncclResult_t group_add_job(ncclResult_t (*run)(void *), void (*cancel)(void *), void *argument)
{
    group.jobs = realloc(group.jobs, (group.job_count + 1) * sizeof *group.jobs);
    if (!group.jobs)
        abort();
    group.jobs[group.job_count++] = (job){run, cancel, argument, ncclSuccess};
    return ncclSuccess;
}

/* --- launching ------------------------------------------------------------------------------- */

static CUresult run_group(void *argument)
{
    group_calls *calls = argument;
    ncclComm_t comm = calls->comm;
    comm->running++;
    if (!comm_stopped(comm)) {
        ncclResult_t result = exchange(calls);
        if (result == ncclUnhandledCudaError) { /* memory that is no more */
            comm_raise(comm, result);
            comm->running--;
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        }
        if (result != ncclSuccess && result != ncclInProgress)
            comm_raise(comm, result);
    }
    comm->running--;
    return CUDA_SUCCESS;
}

static void release_group(void *argument)
{
    group_calls *calls = argument;
    for (size_t i = 0; i < calls->count; i++)
        free(calls->calls[i].awaited);
    free(calls);
}

static bool seen_stream(const group_calls *calls, size_t before, cudaStream_t stream)
{
    for (size_t i = 0; i < before; i++)
        if (calls->calls[i].stream == stream)
            return true;
    return false;
}

/* One operation on the first stream; the other streams join before and continue after it. */
static CUresult enqueue(group_calls *calls)
{
    size_t count = calls->count;
    CUstream first = calls->calls[0].stream;
    double_range *reads = allocate(count * sizeof *reads);
    double_range *writes = allocate(count * sizeof *writes);
    cudaStream_t *others = allocate(count * sizeof *others);
    size_t other_count = 0;
    CUresult error = CUDA_SUCCESS;
    for (size_t i = 0; i < count; i++) {
        const call *of = &calls->calls[i];
        call_spans(of, &reads[i].bytes, &writes[i].bytes);
        reads[i].address = (CUdeviceptr)of->send;
        writes[i].address = (CUdeviceptr)of->receive;
        if (i > 0 && of->stream != first && !seen_stream(calls, i, of->stream)) {
            others[other_count++] = of->stream;
            if (error == CUDA_SUCCESS)
                error = double_stream_wait(first, of->stream);
        }
    }
    char name[40];
    snprintf(name, sizeof name, count > 1 ? "%s and %zu more" : "%s",
             call_name(calls->calls[0].kind), count - 1);
    double_operation operation = {name,  run_group, release_group, calls,
                                  reads, count,     writes,        count,
                                  &calls->comm->order};
    if (error == CUDA_SUCCESS)
        error = double_enqueue(first, &operation);
    else
        release_group(calls);
    for (size_t i = 0; i < other_count && error == CUDA_SUCCESS; i++)
        error = double_stream_wait(others[i], first);
    free(reads);
    free(writes);
    free(others);
    return error;
}

static ncclResult_t launch(group_calls *calls)
{
    ncclComm_t comm = calls->comm;
    CUresult error = double_push_device(comm->device);
    if (error != CUDA_SUCCESS) {
        release_group(calls);
    } else {
        error = enqueue(calls);
        double_pop_device();
    }
    if (error != CUDA_SUCCESS && !comm->blocking)
        comm_raise(comm, ncclUnhandledCudaError);
    return cuda_failure(error);
}

ncclResult_t launch_deferred(ncclComm_t comm)
{
    group_calls *calls = comm->deferred;
    comm->deferred = NULL;
    ncclResult_t result = launch(calls);
    atomic_compare_exchange_strong(&comm->async, &(int){ncclInProgress}, (int)result);
    return result;
}

void drop_deferred(ncclComm_t comm)
{
    if (comm->deferred)
        release_group(comm->deferred);
    comm->deferred = NULL;
}

/* With PYCOMM_DOUBLE_IN_PROGRESS=n a communicator that does not block enqueues only after n polls
 * of its state, as the library may. */
static ncclResult_t launch_or_defer(group_calls *calls)
{
    const char *polls = getenv("PYCOMM_DOUBLE_IN_PROGRESS");
    ncclComm_t comm = calls->comm;
    if (comm->blocking || !polls || atoi(polls) <= 0)
        return launch(calls);
    comm->polls_left = atoi(polls);
    comm->deferred = calls;
    comm->async = ncclInProgress;
    return ncclInProgress;
}

static ncclResult_t launch_all(call *calls, size_t count)
{
    ncclResult_t result = ncclSuccess;
    for (size_t i = 0; i < count; i++) {
        if (!calls[i].comm)
            continue;
        group_calls *of = allocate(sizeof *of + count * sizeof *of->calls);
        of->comm = calls[i].comm;
        for (size_t j = i; j < count; j++)
            if (calls[j].comm == of->comm) {
                of->calls[of->count++] = calls[j];
                if (j > i)
                    calls[j].comm = NULL;
            }
        ncclResult_t launched = launch_or_defer(of);
        if (result == ncclSuccess || (result == ncclInProgress && launched != ncclSuccess))
            result = launched;
    }
    return result;
}

ncclResult_t group_add(const call *added)
{
    if (group.depth == 0) {
        call alone = *added;
        return launch_all(&alone, 1);
    }
    group.calls = realloc(group.calls, (group.call_count + 1) * sizeof *group.calls);
    if (!group.calls)
        abort();
    group.calls[group.call_count++] = *added;
    return ncclSuccess;
}

/* --- the functions --------------------------------------------------------------------------- */

static void *run_in_thread(void *argument)
{
    job *of = argument;
    of->code = of->run(of->argument);
    return NULL;
}

/* Beside each other: ranks of one process wait for one another. */
static ncclResult_t run_jobs(job *jobs, size_t count)
{
    pthread_t *threads = allocate(count * sizeof *threads);
    ncclResult_t result = ncclSuccess;
    for (size_t i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, run_in_thread, &jobs[i]) != 0)
            abort();
    for (size_t i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    for (size_t i = 0; i < count; i++)
        if (result == ncclSuccess || (result == ncclInProgress && jobs[i].code != ncclSuccess))
            result = jobs[i].code;
    free(threads);
    return result;
}

ncclResult_t ncclGroupStart()
{
    ENTER();
    group.depth++;
    return ncclSuccess;
}

static ncclResult_t end(bool simulate)
{
    if (group.depth == 0)
        return fail(ncclInvalidUsage,
                    "ncclGroupEnd: not in a group call; ncclGroupStart must come first");
    if (--group.depth > 0)
        return ncclSuccess;
    ncclResult_t result = group.failed;
    if (result == ncclSuccess && group.job_count && group.call_count)
        result = fail(ncclInvalidUsage, "initialisation and communication in one group");
    if (result == ncclSuccess && !simulate) {
        result = run_jobs(group.jobs, group.job_count);
        if (result == ncclSuccess)
            result = launch_all(group.calls, group.call_count);
    } else {
        for (size_t i = 0; i < group.job_count; i++)
            group.jobs[i].cancel(group.jobs[i].argument);
        for (size_t i = 0; i < group.call_count; i++)
            free(group.calls[i].awaited);
    }
    group.failed = ncclSuccess;
    group.call_count = group.job_count = 0;
    return result;
}

ncclResult_t ncclGroupEnd()
{
    ENTER();
    return end(false);
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *info)
{
    ENTER();
    if (info && (info->magic != 0x74685283 || info->size < sizeof *info))
        return fail(ncclInvalidArgument, "ncclSimInfo_t argument not initialized");
    TRY(end(true));
    if (info)
        info->estimatedTime = 0.0f;
    return ncclSuccess;
}

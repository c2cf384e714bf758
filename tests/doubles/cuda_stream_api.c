/* The functions of streams and events. */
#include "cuda_state.h"

CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned int flags, int priority)
{
    ENTER_CONTEXT(current);
    if (!handle || flags > CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    stream *created = stream_new(current, flags, priority);
    *handle = created->handle = handle_new(STREAM, created);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *handle, unsigned int flags)
{
    ENTER_CONTEXT(current);
    if (!handle || flags > CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    stream *created = stream_new(current, flags, 0);
    *handle = created->handle = handle_new(STREAM, created);
    return CUDA_SUCCESS;
}

/* Returns at once; what is queued still runs. */
CUresult cuStreamDestroy(CUstream handle)
{
    ENTER();
    stream *gone = handle_find(STREAM, handle);
    if (!gone)
        return CUDA_ERROR_INVALID_HANDLE;
    TRY(capture_forbids(gone));
    handle_drop(handle);
    gone->destroyed = true;
    pthread_cond_broadcast(&state_changed);
    return usable_context(gone->of);
}

CUresult cuStreamSynchronize(CUstream handle)
{
    ENTER();
    stream *on;
    TRY(stream_find(handle, &on));
    TRY(capture_forbids(on));
    TRY(capture_legacy(on));
    stream_synchronise(on);
    if (on == on->of->legacy) /* it counts as after all blocking streams */
        for (stream *other = on->of->streams; other; other = other->next)
            if (!(other->flags & CU_STREAM_NON_BLOCKING))
                stream_synchronise(other);
    return usable_context(on->of);
}

CUresult cuStreamQuery(CUstream handle)
{
    ENTER();
    stream *on;
    TRY(stream_find(handle, &on));
    TRY(capture_forbids(on));
    TRY(capture_legacy(on));
    if (on == on->of->legacy)
        for (stream *other = on->of->streams; other; other = other->next)
            if (!(other->flags & CU_STREAM_NON_BLOCKING) && !stream_done(other, other->enqueued))
                return CUDA_ERROR_NOT_READY;
    if (!stream_done(on, on->enqueued))
        return CUDA_ERROR_NOT_READY;
    stream_synchronise(on);
    return usable_context(on->of);
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *found)
{
    ENTER();
    stream *on;
    TRY(stream_find(handle, &on));
    *found = on->of->handle;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags)
{
    ENTER();
    stream *on;
    TRY(stream_find(handle, &on));
    *flags = on->flags;
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent awaited_handle, unsigned int flags)
{
    ENTER();
    stream *on;
    TRY(stream_find(handle, &on));
    event *awaited = handle_find(EVENT, awaited_handle);
    if (!awaited)
        return CUDA_ERROR_INVALID_HANDLE;
    if (flags != 0)
        return flags == CU_EVENT_WAIT_EXTERNAL ? CUDA_ERROR_NOT_SUPPORTED
                                               : CUDA_ERROR_INVALID_VALUE;
    return stream_wait_event(on, awaited);
}

typedef struct {
    CUhostFn function;
    void *data;
    vector_clock clock;
} host_call;

static CUresult run_host_call(void *argument)
{
    host_call *call = argument;
    in_host_function = true;
    call->function(call->data);
    in_host_function = false;
    pthread_mutex_lock(&state_lock);
    clock_join(&host_clock, &call->clock); /* the function may have told the host so */
    pthread_mutex_unlock(&state_lock);
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data)
{
    ENTER();
    stream *on;
    TRY(stream_for_launch(handle, &on));
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    host_call *call = must_allocate(sizeof *call);
    call->function = function;
    call->data = data;
    body *what = body_new("cuLaunchHostFunc", run_host_call, free, call);
    what->references++; /* so that the call outlives a failure */
    CUresult error = stream_submit(on, what);
    if (error == CUDA_SUCCESS && !on->capturing)
        call->clock = on->clock;
    body_drop(what);
    return error;
}

/* --- events ---------------------------------------------------------------------------------- */

CUresult cuEventCreate(CUevent *handle, unsigned int flags)
{
    ENTER_CONTEXT(current);
    if (!handle || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    event *created = must_allocate(sizeof *created);
    created->of = current;
    created->flags = flags;
    *handle = created->handle = handle_new(EVENT, created);
    return CUDA_SUCCESS;
}

static CUresult event_find(CUevent handle, event **found)
{
    *found = handle_find(EVENT, handle);
    if (!*found)
        return CUDA_ERROR_INVALID_HANDLE;
    return usable_context((*found)->of);
}

CUresult cuEventRecordWithFlags(CUevent handle, CUstream on_handle, unsigned int flags)
{
    ENTER();
    stream *on;
    event *recorded;
    TRY(event_find(handle, &recorded));
    TRY(stream_find(on_handle, &on));
    if (recorded->of != on->of)
        return CUDA_ERROR_INVALID_HANDLE;
    if (flags > CU_EVENT_RECORD_EXTERNAL)
        return CUDA_ERROR_INVALID_VALUE;
    if (flags == CU_EVENT_RECORD_EXTERNAL && on->capturing)
        return CUDA_ERROR_NOT_SUPPORTED; /* nodes of events are not doubled */
    return stream_record(on, recorded);
}

CUresult cuEventRecord(CUevent handle, CUstream on_handle)
{
    ENTER();
    stream *on;
    event *recorded;
    TRY(event_find(handle, &recorded));
    TRY(stream_find(on_handle, &on));
    if (recorded->of != on->of)
        return CUDA_ERROR_INVALID_HANDLE;
    return stream_record(on, recorded);
}

CUresult cuEventQuery(CUevent handle)
{
    ENTER();
    event *asked;
    TRY(event_find(handle, &asked));
    TRY(capture_forbids_event(asked));
    TRY(unsafe_call());
    if (!asked->recorded)
        return CUDA_SUCCESS;
    if (!stream_done(asked->on, asked->sequence))
        return CUDA_ERROR_NOT_READY;
    clock_join(&host_clock, &asked->clock);
    return usable_context(asked->of);
}

CUresult cuEventSynchronize(CUevent handle)
{
    ENTER();
    event *asked;
    TRY(event_find(handle, &asked));
    TRY(capture_forbids_event(asked));
    TRY(unsafe_call());
    if (!asked->recorded)
        return CUDA_SUCCESS;
    stream *on = asked->on;
    unsigned long long sequence = asked->sequence;
    vector_clock then = asked->clock;
    while (!stream_done(on, sequence))
        pthread_cond_wait(&state_changed, &state_lock);
    clock_join(&host_clock, &then);
    return usable_context(asked->of);
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent first_handle, CUevent last_handle)
{
    ENTER();
    event *first, *last;
    TRY(event_find(first_handle, &first));
    TRY(event_find(last_handle, &last));
    if (!first->recorded || !last->recorded ||
        (first->flags | last->flags) & CU_EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    TRY(capture_forbids_event(first));
    TRY(capture_forbids_event(last));
    if (!stream_done(first->on, first->sequence) || !stream_done(last->on, last->sequence))
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(last->time.tv_sec - first->time.tv_sec) * 1e3 +
                            (double)(last->time.tv_nsec - first->time.tv_nsec) * 1e-6);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent handle)
{
    ENTER();
    event *gone = handle_find(EVENT, handle);
    if (!gone)
        return CUDA_ERROR_INVALID_HANDLE;
    handle_drop(handle);
    return usable_context(gone->of);
}

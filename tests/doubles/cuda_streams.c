/*
 * Streams: queues that threads empty.
 *
 * An operation starts when all before it in its stream are done and what it waits for is done: ends
 * of other streams, by events or by the rules of the legacy stream. What is waited for was always
 * enqueued earlier, so there are no cycles.
 */
#include "cuda_state.h"

#include <stdio.h>
#include <unistd.h>

static unsigned delay_us;
static int stream_numbers;

void double_set_delay_us(unsigned microseconds)
{
    __atomic_store_n(&delay_us, microseconds, __ATOMIC_RELAXED);
}

/* --- what operations do ---------------------------------------------------------------------- */

body *body_new(const char *name, double_run run, void (*release)(void *), void *argument)
{
    body *created = must_allocate(sizeof *created);
    created->references = 1;
    snprintf(created->name, sizeof created->name, "%s", name);
    created->run = run;
    created->release = release;
    created->argument = argument;
    return created;
}

void body_ranges(body *what, const double_range *reads, size_t read_count,
                 const double_range *writes, size_t write_count)
{
    what->ranges = must_allocate((read_count + write_count) * sizeof *what->ranges);
    if (read_count)
        memcpy(what->ranges, reads, read_count * sizeof *reads);
    if (write_count)
        memcpy(what->ranges + read_count, writes, write_count * sizeof *writes);
    what->read_count = read_count;
    what->write_count = write_count;
}

void body_drop(body *what)
{
    if (--what->references > 0)
        return;
    if (what->release)
        what->release(what->argument);
    free(what->ranges);
    free(what);
}

/* --- the thread of a stream ------------------------------------------------------------------ */

bool stream_done(const stream *on, unsigned long long sequence)
{
    return on->completed >= sequence;
}

static bool may_start(const operation *next)
{
    for (size_t i = 0; i < next->wait_count; i++)
        if (!stream_done(next->waits[i].on, next->waits[i].sequence))
            return false;
    return true;
}

static void *work(void *argument)
{
    stream *of = argument;
    pthread_mutex_lock(&state_lock);
    for (;;) {
        while (!of->head && !of->destroyed)
            pthread_cond_wait(&state_changed, &state_lock);
        if (!of->head)
            break;
        while (!may_start(of->head))
            pthread_cond_wait(&state_changed, &state_lock);
        operation *next = of->head;
        if (usable_context(of->of) == CUDA_SUCCESS) {
            operations_running(+1);
            pthread_mutex_unlock(&state_lock);
            unsigned delay = __atomic_load_n(&delay_us, __ATOMIC_RELAXED);
            if (delay)
                usleep(delay);
            CUresult error = next->what->run(next->what->argument);
            pthread_mutex_lock(&state_lock);
            operations_running(-1);
            if (error != CUDA_SUCCESS && of->of->sticky == CUDA_SUCCESS)
                of->of->sticky = error;
        }
        of->head = next->next;
        if (!of->head)
            of->tail = NULL;
        of->completed++;
        body_drop(next->what);
        free(next->waits);
        free(next);
        pthread_cond_broadcast(&state_changed);
    }
    of->has_worker = false;
    pthread_mutex_unlock(&state_lock);
    return NULL;
}

/* Detached: the end of the process does not wait for it. */
static void ensure_worker(stream *of)
{
    if (of->has_worker)
        return;
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, work, of) != 0) {
        fputs("double: no thread for a stream\n", stderr);
        abort();
    }
    pthread_attr_destroy(&attributes);
    of->has_worker = true;
}

/* --- enqueueing ------------------------------------------------------------------------------ */

static void add_wait(wait_point **waits, size_t *count, stream *on, unsigned long long sequence)
{
    if (stream_done(on, sequence))
        return;
    *waits = must_grow(*waits, (*count + 1) * sizeof **waits);
    (*waits)[(*count)++] = (wait_point){on, sequence};
}

static bool is_blocking(const stream *of)
{
    return of != of->of->legacy && !(of->flags & CU_STREAM_NON_BLOCKING);
}

void stream_prepare(stream *on, wait_point **waits, size_t *count)
{
    clock_join(&on->clock, &host_clock);
    if (on == on->of->legacy) {
        for (stream *other = on->of->streams; other; other = other->next)
            if (is_blocking(other) && !other->destroyed) {
                clock_join(&on->clock, &other->clock);
                add_wait(waits, count, other, other->enqueued);
            }
    } else if (is_blocking(on)) {
        clock_join(&on->clock, &on->of->legacy->clock);
        add_wait(waits, count, on->of->legacy, on->of->legacy->enqueued);
    }
}

void stream_push(stream *on, body *what, wait_point *waits, size_t count, const access_by *by)
{
    for (size_t i = 0; i < what->read_count + what->write_count; i++)
        note_access(by, what->ranges[i].address, what->ranges[i].bytes, i >= what->read_count);
    operation *created = must_allocate(sizeof *created);
    created->what = what;
    if (what->order) {
        stream *last = what->order->stream;
        if (last && last != on)
            add_wait(&waits, &count, last, what->order->sequence);
        what->order->stream = on;
        what->order->sequence = on->enqueued + 1;
    }
    created->waits = waits;
    created->wait_count = count;
    if (on->tail)
        on->tail->next = created;
    else
        on->head = created;
    on->tail = created;
    on->enqueued++;
    ensure_worker(on);
    pthread_cond_broadcast(&state_changed);
}

static void push_now(stream *on, body *what, wait_point *waits, size_t count)
{
    stream_prepare(on, &waits, &count);
    on->clock.tick[on->component] = component_tick(on->component);
    access_by by = {what->name, on->number, on->component, &on->clock};
    stream_push(on, what, waits, count, &by);
}

CUresult stream_submit(stream *on, body *what)
{
    CUresult error = usable_context(on->of);
    if (error == CUDA_SUCCESS)
        error = capture_legacy(on);
    if (error != CUDA_SUCCESS) {
        body_drop(what);
        return error;
    }
    if (on->capturing)
        return capture_body(on, what);
    push_now(on, what, NULL, 0);
    return CUDA_SUCCESS;
}

void stream_synchronise(stream *on)
{
    unsigned long long sequence = on->enqueued;
    vector_clock then = on->clock;
    while (!stream_done(on, sequence))
        pthread_cond_wait(&state_changed, &state_lock);
    clock_join(&host_clock, &then);
}

/* --- events ---------------------------------------------------------------------------------- */

static CUresult run_nothing(void *argument)
{
    (void)argument;
    return CUDA_SUCCESS;
}

typedef struct {
    CUevent handle;
    stream *on;
    unsigned long long sequence;
} stamp;

/* The time of an event, unless it was recorded again since. */
static CUresult run_stamp(void *argument)
{
    stamp *stamped = argument;
    pthread_mutex_lock(&state_lock);
    event *of = handle_find(EVENT, stamped->handle);
    if (of && of->on == stamped->on && of->sequence == stamped->sequence)
        clock_gettime(CLOCK_MONOTONIC, &of->time);
    pthread_mutex_unlock(&state_lock);
    return CUDA_SUCCESS;
}

CUresult stream_record(stream *on, event *recorded)
{
    TRY(usable_context(on->of));
    TRY(capture_legacy(on));
    if (on->capturing) {
        TRY(capture_body(on, NULL)); /* only whether the capture still is valid */
        free(recorded->after);
        recorded->after = must_allocate(on->after_count * sizeof *on->after);
        memcpy(recorded->after, on->after, on->after_count * sizeof *on->after);
        recorded->after_count = on->after_count;
        recorded->captured_in = on->capturing->id;
        recorded->recorded = true;
        return CUDA_SUCCESS;
    }
    stamp *stamped = must_allocate(sizeof *stamped);
    *stamped = (stamp){recorded->handle, on, on->enqueued + 1};
    recorded->on = on;
    recorded->sequence = on->enqueued + 1;
    recorded->captured_in = 0;
    recorded->recorded = true;
    push_now(on, body_new("cuEventRecord", run_stamp, free, stamped), NULL, 0);
    recorded->clock = on->clock;
    return CUDA_SUCCESS;
}

CUresult stream_wait_event(stream *on, event *awaited)
{
    TRY(usable_context(on->of));
    if (!awaited->recorded)
        return CUDA_SUCCESS;
    if (on->capturing || awaited->captured_in)
        return capture_join(on, awaited);
    TRY(capture_legacy(on));
    wait_point *waits = NULL;
    size_t count = 0;
    add_wait(&waits, &count, awaited->on, awaited->sequence);
    clock_join(&on->clock, &awaited->clock);
    push_now(on, body_new("cuStreamWaitEvent", run_nothing, NULL, NULL), waits, count);
    return CUDA_SUCCESS;
}

/* --- streams --------------------------------------------------------------------------------- */

stream *stream_new(context *of, unsigned flags, int priority)
{
    stream *created = must_allocate(sizeof *created);
    created->of = of;
    created->flags = flags;
    created->priority = priority < -5 ? -5 : priority > 0 ? 0 : priority;
    created->number = stream_numbers++;
    created->component = component_new();
    created->next = of->streams;
    of->streams = created;
    return created;
}

/* The stream of the calling thread in the current context, which stands for the handle 2. */
static stream *thread_stream(context *current)
{
    for (stream *of = current->streams; of; of = of->next)
        if (of->per_thread && pthread_equal(of->owner, pthread_self()))
            return of;
    stream *created = stream_new(current, CU_STREAM_DEFAULT, 0);
    created->per_thread = true;
    created->owner = pthread_self();
    return created;
}

CUresult stream_find(CUstream handle, stream **found)
{
    if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        context *current;
        TRY(current_context(&current));
        *found = handle == CU_STREAM_PER_THREAD ? thread_stream(current) : current->legacy;
        return CUDA_SUCCESS;
    }
    *found = handle_find(STREAM, handle);
    return *found ? usable_context((*found)->of) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult stream_for_launch(CUstream handle, stream **found)
{
    context *current;
    TRY(current_context(&current));
    TRY(stream_find(handle, found));
    return (*found)->of == current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* --- for the double of libnccl --------------------------------------------------------------- */

CUresult double_enqueue(CUstream handle, const double_operation *asked)
{
    pthread_mutex_lock(&state_lock);
    body *what = body_new(asked->name, asked->run, asked->release, asked->argument);
    body_ranges(what, asked->reads, asked->read_count, asked->writes, asked->write_count);
    what->order = asked->order;
    stream *on;
    CUresult error = stream_for_launch(handle, &on);
    if (error == CUDA_SUCCESS)
        error = stream_submit(on, what);
    else
        body_drop(what);
    pthread_mutex_unlock(&state_lock);
    return error;
}

CUresult double_stream_wait(CUstream waiting, CUstream awaited)
{
    stream *after, *before;
    pthread_mutex_lock(&state_lock);
    CUresult error = stream_find(waiting, &after);
    if (error == CUDA_SUCCESS)
        error = stream_find(awaited, &before);
    if (error == CUDA_SUCCESS && after != before) {
        event between = {.of = before->of};
        error = stream_record(before, &between);
        if (error == CUDA_SUCCESS)
            error = stream_wait_event(after, &between);
        free(between.after);
    }
    pthread_mutex_unlock(&state_lock);
    return error;
}

CUresult double_stream_device(CUstream handle, int *ordinal)
{
    stream *on;
    pthread_mutex_lock(&state_lock);
    CUresult error = stream_find(handle, &on);
    if (error == CUDA_SUCCESS)
        *ordinal = on->of->ordinal;
    pthread_mutex_unlock(&state_lock);
    return error;
}

void double_order_wait(const double_order *order)
{
    pthread_mutex_lock(&state_lock);
    if (order->stream)
        while (!stream_done(order->stream, order->sequence))
            pthread_cond_wait(&state_changed, &state_lock);
    pthread_mutex_unlock(&state_lock);
}

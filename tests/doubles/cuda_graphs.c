/*
 * Capture and graphs.
 *
 * A capturing stream keeps the nodes that its next node follows. A graph runs its nodes one after
 * the other in the order of capture, which every order of the nodes allows; the clocks however
 * follow the edges, so that a wait that was not captured is found at the launch.
 */
#include "cuda_state.h"

static capture *captures;
static unsigned long long capture_ids;
static _Thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

typedef struct {
    CUgraphExec handle;
    node *nodes; /* the bodies are shared with the graph */
    size_t count;
    int branches;
    int *components;
    vector_clock last; /* a graph does not run beside itself */
} exec;

/* --- capturing ------------------------------------------------------------------------------- */

static void set_after(stream *on, const size_t *nodes, size_t count)
{
    size_t *copied = must_allocate(count * sizeof *copied);
    if (count)
        memcpy(copied, nodes, count * sizeof *copied);
    free(on->after);
    on->after = copied;
    on->after_count = count;
}

static capture *capture_with(unsigned long long id)
{
    for (capture *of = captures; of; of = of->next)
        if (of->id == id)
            return of;
    return NULL;
}

static void join_capture(stream *on, capture *of)
{
    on->capturing = of;
    on->branch = of->into->branches++;
    set_after(on, NULL, 0);
}

CUresult capture_body(stream *on, body *what)
{
    capture *of = on->capturing;
    if (of->invalid) {
        if (what)
            body_drop(what);
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (!what)
        return CUDA_SUCCESS;
    graph *into = of->into;
    if (into->count == into->room) {
        into->room = into->room ? 2 * into->room : 16;
        into->nodes = must_grow(into->nodes, into->room * sizeof *into->nodes);
    }
    size_t index = into->count++;
    node *created = &into->nodes[index];
    *created = (node){.what = what, .branch = on->branch};
    created->handle = handle_new(NODE, into);
    created->after = on->after;
    created->after_count = on->after_count;
    on->after = NULL;
    set_after(on, &index, 1);
    return CUDA_SUCCESS;
}

CUresult capture_forbids(stream *on)
{
    if (!on->capturing)
        return CUDA_SUCCESS;
    if (on->capturing->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    on->capturing->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult capture_forbids_event(const event *asked)
{
    if (!asked->captured_in)
        return CUDA_SUCCESS;
    capture *of = capture_with(asked->captured_in);
    if (of)
        of->invalid = true;
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult capture_forbids_context(const context *asked)
{
    CUresult error = CUDA_SUCCESS;
    for (capture *of = captures; of; of = of->next)
        if (of->origin->of == asked) {
            of->invalid = true;
            error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return error;
}

CUresult capture_legacy(const stream *on)
{
    CUresult error = CUDA_SUCCESS;
    if (on != on->of->legacy)
        return error;
    for (const stream *other = on->of->streams; other; other = other->next)
        if (other->capturing && !(other->flags & CU_STREAM_NON_BLOCKING)) {
            other->capturing->invalid = true;
            error = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return error;
}

CUresult unsafe_call(void)
{
    CUresult error = CUDA_SUCCESS;
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return error;
    for (capture *of = captures; of; of = of->next) {
        bool mine = pthread_equal(of->thread, pthread_self());
        bool forbids = mine ? of->mode != CU_STREAM_CAPTURE_MODE_RELAXED
                            : of->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                                  thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (forbids) {
            of->invalid = true;
            error = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return error;
}

CUresult capture_join(stream *on, const event *awaited)
{
    capture *of = awaited->captured_in ? capture_with(awaited->captured_in) : NULL;
    if (on->capturing && on->capturing->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!of) {
        if (!on->capturing)
            return CUDA_ERROR_INVALID_VALUE; /* of a capture that has ended */
        on->capturing->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (of->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (on->capturing && on->capturing != of) {
        on->capturing->invalid = of->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (on == on->of->legacy) {
        of->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (!on->capturing)
        join_capture(on, of);
    size_t count = on->after_count + awaited->after_count;
    size_t *merged = must_allocate(count * sizeof *merged);
    if (on->after_count)
        memcpy(merged, on->after, on->after_count * sizeof *merged);
    count = on->after_count;
    for (size_t i = 0; i < awaited->after_count; i++) {
        bool known = false;
        for (size_t j = 0; j < count; j++)
            known |= merged[j] == awaited->after[i];
        if (!known)
            merged[count++] = awaited->after[i];
    }
    free(on->after);
    on->after = merged;
    on->after_count = count;
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode)
{
    ENTER();
    stream *on;
    TRY(stream_find(handle, &on));
    if (on == on->of->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (on->capturing)
        return CUDA_ERROR_ILLEGAL_STATE;
    capture *created = must_allocate(sizeof *created);
    created->id = ++capture_ids;
    created->mode = mode;
    created->thread = pthread_self();
    created->origin = on;
    created->into = must_allocate(sizeof *created->into);
    created->into->handle = handle_new(GRAPH, created->into);
    created->next = captures;
    captures = created;
    join_capture(on, created);
    return CUDA_SUCCESS;
}

static void graph_free(graph *gone)
{
    for (size_t i = 0; i < gone->count; i++) {
        body_drop(gone->nodes[i].what);
        handle_drop(gone->nodes[i].handle);
        free(gone->nodes[i].after);
    }
    handle_drop(gone->handle);
    free(gone->nodes);
    free(gone);
}

/* Whether all nodes come before what the origin of the capture would do next. */
static bool all_joined(const graph *of, const stream *origin)
{
    bool *reached = must_allocate(of->count * sizeof *reached);
    for (size_t i = 0; i < origin->after_count; i++)
        reached[origin->after[i]] = true;
    bool all = true;
    for (size_t i = of->count; i-- > 0;) {
        all &= reached[i];
        for (size_t j = 0; reached[i] && j < of->nodes[i].after_count; j++)
            reached[of->nodes[i].after[j]] = true;
    }
    free(reached);
    return all;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *into)
{
    ENTER();
    stream *on;
    TRY(stream_find(handle, &on));
    capture *ended = on->capturing;
    if (into)
        *into = NULL;
    if (!ended || !into)
        return ended ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_ILLEGAL_STATE;
    if (ended->origin != on) {
        ended->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (ended->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
        !pthread_equal(ended->thread, pthread_self())) {
        ended->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    CUresult error = CUDA_SUCCESS;
    if (ended->invalid)
        error = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (!all_joined(ended->into, on))
        error = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    for (int i = 0; i < device_count; i++)
        if (devices[i].primary)
            for (stream *of = devices[i].primary->streams; of; of = of->next)
                if (of->capturing == ended)
                    of->capturing = NULL;
    capture **link = &captures;
    while (*link != ended)
        link = &(*link)->next;
    *link = ended->next;
    if (error == CUDA_SUCCESS)
        *into = ended->into->handle;
    else
        graph_free(ended->into);
    free(ended);
    return error;
}

static CUresult capture_status(CUstream handle, CUstreamCaptureStatus *status, stream **found)
{
    TRY(stream_find(handle, found));
    if (!status)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(capture_legacy(*found));
    capture *of = (*found)->capturing;
    *status = !of           ? CU_STREAM_CAPTURE_STATUS_NONE
              : of->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                            : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status)
{
    ENTER();
    stream *on;
    return capture_status(handle, status, &on);
}

static CUresult capture_info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                             CUgraph *into, const CUgraphNode **nodes, size_t *count)
{
    static _Thread_local CUgraphNode *listed;
    stream *on;
    TRY(capture_status(handle, status, &on));
    if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return CUDA_SUCCESS;
    if (id)
        *id = on->capturing->id;
    if (into)
        *into = on->capturing->into->handle;
    if (count)
        *count = on->after_count;
    if (nodes) {
        listed = must_grow(listed, on->after_count * sizeof *listed);
        for (size_t i = 0; i < on->after_count; i++)
            listed[i] = on->capturing->into->nodes[on->after[i]].handle;
        *nodes = listed;
    }
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                   CUgraph *into, const CUgraphNode **nodes, size_t *count)
{
    ENTER();
    return capture_info(handle, status, id, into, nodes, count);
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                   CUgraph *into, const CUgraphNode **nodes,
                                   const CUgraphEdgeData **edges, size_t *count)
{
    ENTER();
    if (edges)
        *edges = NULL;
    return capture_info(handle, status, id, into, nodes, count);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    ENTER();
    if (!mode || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* --- graphs ---------------------------------------------------------------------------------- */

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count)
{
    ENTER();
    graph *of = handle_find(GRAPH, handle);
    if (!of || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; nodes && i < *count; i++)
        nodes[i] = i < of->count ? of->nodes[i].handle : NULL;
    if (!nodes || *count > of->count)
        *count = of->count;
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph handle)
{
    ENTER();
    graph *gone = handle_find(GRAPH, handle);
    if (!gone)
        return CUDA_ERROR_INVALID_VALUE;
    graph_free(gone);
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *handle, CUgraph of_handle,
                                     unsigned long long flags)
{
    ENTER_CONTEXT(current);
    graph *of = handle_find(GRAPH, of_handle);
    if (!handle || !of || flags & ~0xfull)
        return CUDA_ERROR_INVALID_VALUE;
    exec *created = must_allocate(sizeof *created);
    created->count = of->count;
    created->branches = of->branches;
    created->nodes = must_allocate(of->count * sizeof *created->nodes);
    for (size_t i = 0; i < of->count; i++) {
        node *copied = &created->nodes[i];
        *copied = of->nodes[i];
        copied->what->references++;
        copied->after = must_allocate(copied->after_count * sizeof *copied->after);
        if (copied->after_count)
            memcpy(copied->after, of->nodes[i].after, copied->after_count * sizeof *copied->after);
    }
    created->components = must_allocate((size_t)of->branches * sizeof *created->components);
    for (int i = 0; i < of->branches; i++)
        created->components[i] = component_new();
    *handle = created->handle = handle_new(EXEC, created);
    return usable_context(current);
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream on_handle)
{
    ENTER();
    stream *on;
    TRY(stream_for_launch(on_handle, &on));
    exec *launched = handle_find(EXEC, handle);
    if (!launched)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(capture_legacy(on));
    TRY(capture_forbids(on)); /* graphs in graphs are not doubled */
    wait_point *waits = NULL;
    size_t wait_count = 0;
    stream_prepare(on, &waits, &wait_count);
    vector_clock start = on->clock;
    clock_join(&start, &launched->last);
    vector_clock *clocks = must_allocate(launched->count * sizeof *clocks);
    for (size_t i = 0; i < launched->count; i++) {
        node *next = &launched->nodes[i];
        int component = launched->components[next->branch];
        clocks[i] = start;
        for (size_t j = 0; j < next->after_count; j++)
            clock_join(&clocks[i], &clocks[next->after[j]]);
        clocks[i].tick[component] = component_tick(component);
        access_by by = {next->what->name, on->number, component, &clocks[i]};
        next->what->references++;
        stream_push(on, next->what, waits, wait_count, &by);
        waits = NULL; /* what the first waited for, the others follow */
        wait_count = 0;
        clock_join(&on->clock, &clocks[i]);
    }
    free(waits);
    free(clocks);
    on->clock.tick[on->component] = component_tick(on->component);
    launched->last = on->clock;
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec handle)
{
    ENTER();
    exec *gone = handle_find(EXEC, handle);
    if (!gone)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < gone->count; i++) {
        body_drop(gone->nodes[i].what);
        free(gone->nodes[i].after);
    }
    handle_drop(handle);
    free(gone->nodes);
    free(gone->components);
    free(gone);
    return CUDA_SUCCESS;
}

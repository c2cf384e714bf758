/* The state of the double of libcuda. One lock guards all of it; threads of streams run operations
 * without the lock. Contexts, streams and events are never freed, so that a pointer to one stays
 * good; the handles that a program sees are numbers that are never used twice. */
#ifndef PYCOMM_DOUBLE_CUDA_STATE_H
#define PYCOMM_DOUBLE_CUDA_STATE_H

#include "double.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COMPONENTS 128 /* of a vector clock; with more streams some share one, and races hide */
#define MAX_DEVICES 16
#define MAX_DEPTH 64
#define DEVICE_BYTES ((size_t)8 << 30)

typedef struct context context;
typedef struct stream stream;
typedef struct capture capture;

/* --- errors and entry (cuda_entry.c) --------------------------------------------------------- */

extern pthread_mutex_t state_lock;
extern pthread_cond_t state_changed;

/* While a thread is in a function that a stream called, CUDA refuses it everything. */
extern _Thread_local bool in_host_function;

CUresult enter(const char *function, bool initialised, int *locked);
void leave(const int *locked);

/* Counts the call, lets a test make it fail, and holds the lock until the function returns. */
#define ENTER_WHEN(initialised)                                                \
    __attribute__((cleanup(leave))) int locked_ = 0;                           \
    do {                                                                       \
        CUresult error_ = enter(__func__, initialised, &locked_);              \
        if (error_ != CUDA_SUCCESS)                                            \
            return error_;                                                     \
    } while (0)
#define ENTER() ENTER_WHEN(true)
/* The same for functions that need a current context that works. */
#define ENTER_CONTEXT(variable)                                                \
    ENTER();                                                                   \
    context *variable;                                                         \
    TRY(current_context(&variable))
#define TRY(expression)                                                        \
    do {                                                                       \
        CUresult tried_ = (expression);                                        \
        if (tried_ != CUDA_SUCCESS)                                            \
            return tried_;                                                     \
    } while (0)

void *must_allocate(size_t bytes);
void *must_grow(void *memory, size_t bytes);

typedef enum { CONTEXT, STREAM, EVENT, MODULE, FUNCTION, GRAPH, NODE, EXEC } handle_kind;

void *handle_new(handle_kind kind, void *object);
void *handle_find(handle_kind kind, const void *handle); /* NULL: no live handle of that kind */
void handle_drop(const void *handle);

/* --- devices and contexts (cuda_devices.c) --------------------------------------------------- */

typedef struct {
    int physical;
    unsigned char uuid[16];
    context *primary;
    int retained;
    size_t used;
} device;

struct context {
    CUcontext handle;
    device *on;
    int ordinal;
    CUresult sticky;
    bool destroyed;
    stream *streams;
    stream *legacy;
};

extern device devices[MAX_DEVICES];
extern int device_count;
extern bool initialised_cuda;

CUresult start_devices(void);
CUresult current_context(context **found);
CUresult usable_context(const context *used);

/* --- clocks and races (cuda_races.c) --------------------------------------------------------- */

typedef struct {
    unsigned long long tick[COMPONENTS];
} vector_clock;

typedef struct {
    uintptr_t begin, end;
    bool writes;
    int component;
    unsigned long long tick;
    int stream;
    char name[40];
} access_entry;

extern vector_clock host_clock;

void clock_join(vector_clock *clock, const vector_clock *other);
int component_new(void);
unsigned long long component_tick(int component);

typedef struct {
    access_entry *entries;
    size_t count, room;
} access_list;

typedef struct {
    const char *name;
    int stream;
    int component;
    const vector_clock *clock;
} access_by;

void note_access(const access_by *by, uintptr_t begin, size_t bytes, bool writes);

/* --- memory (cuda_memory.c) ------------------------------------------------------------------ */

typedef struct {
    uintptr_t begin; /* what the program sees */
    size_t bytes;
    unsigned char *memory; /* what operations use: elsewhere for device memory */
    size_t mapped;
    context *owner;
    bool on_device, registered, freeing;
    unsigned long long id;
    access_list accesses;
} allocation;

allocation *allocation_at(uintptr_t address);                /* live, or NULL */
allocation *allocation_of(uintptr_t address, size_t bytes);  /* all of the range lies in it */
bool in_device_window(uintptr_t address);
void *translate(uintptr_t address, size_t bytes);
bool tail_intact(uintptr_t address);
void allocation_free(allocation *freed);
void free_context_memory(const context *owner);
CUresult unsafe_call(void); /* whether an ongoing capture forbids it */
/* Memory that goes while operations run is unmapped after the last of them. */
void operations_running(int change);

/* --- streams (cuda_streams.c) ---------------------------------------------------------------- */

/* What an operation does; shared by the queue and by graphs. */
typedef struct {
    int references;
    char name[40];
    double_run run;
    void (*release)(void *argument);
    void *argument;
    double_range *ranges; /* reads, then writes */
    size_t read_count, write_count;
    double_order *order;
} body;

typedef struct {
    stream *on;
    unsigned long long sequence;
} wait_point;

typedef struct operation {
    struct operation *next;
    body *what;
    wait_point *waits;
    size_t wait_count;
} operation;

struct stream {
    stream *next;
    CUstream handle;
    context *of;
    unsigned flags;
    int priority;
    int number;
    bool destroyed, has_worker;
    pthread_t owner; /* of a default stream of a thread */
    bool per_thread;
    operation *head, *tail;
    unsigned long long enqueued, completed;
    vector_clock clock;
    int component;
    /* while capturing: */
    capture *capturing;
    int branch;
    size_t *after; /* nodes that the next node follows */
    size_t after_count;
};

typedef struct {
    CUevent handle;
    context *of;
    unsigned flags;
    bool recorded;
    stream *on;
    unsigned long long sequence;
    vector_clock clock;
    struct timespec time;
    unsigned long long captured_in; /* id of a capture, 0: none */
    size_t *after;
    size_t after_count;
} event;

stream *stream_new(context *of, unsigned flags, int priority);
CUresult stream_find(CUstream handle, stream **found);        /* any usable context */
CUresult stream_for_launch(CUstream handle, stream **found);  /* of the current context */
void stream_wait_idle(stream *on);
body *body_new(const char *name, double_run run, void (*release)(void *), void *argument);
void body_ranges(body *what, const double_range *reads, size_t read_count,
                 const double_range *writes, size_t write_count);
void body_drop(body *what);
/* Takes over one reference of the body; runs it in the order of the stream, or captures it. */
CUresult stream_submit(stream *on, body *what);
/* The clock of whatever is enqueued next, and what it waits for by the rules of streams. */
void stream_prepare(stream *on, wait_point **waits, size_t *count);
void stream_push(stream *on, body *what, wait_point *waits, size_t count, const access_by *by);
void stream_synchronise(stream *on);
bool stream_done(const stream *on, unsigned long long sequence);
CUresult stream_wait_event(stream *on, event *awaited);
CUresult stream_record(stream *on, event *recorded);

/* --- capture (cuda_graphs.c) ----------------------------------------------------------------- */

typedef struct {
    CUgraphNode handle;
    body *what;
    size_t *after;
    size_t after_count;
    int branch;
} node;

typedef struct {
    CUgraph handle;
    node *nodes;
    size_t count, room;
    int branches;
} graph;

struct capture {
    capture *next;
    unsigned long long id;
    bool invalid;
    CUstreamCaptureMode mode;
    pthread_t thread;
    stream *origin;
    graph *into;
};

/* CUDA_SUCCESS when the stream is in no capture; else ends the capture it is in. */
CUresult capture_forbids(stream *on);
CUresult capture_body(stream *on, body *what);
CUresult capture_join(stream *on, const event *awaited);
/* Work on the legacy stream disturbs captures on blocking streams. */
CUresult capture_legacy(const stream *on);
CUresult capture_forbids_event(const event *asked);
CUresult capture_forbids_context(const context *asked);

#endif

/*
 * What the two doubles share, and what a test can ask of them.
 *
 * The double of libcuda owns memory, streams, clocks and the controls of a test. The double of
 * libnccl is a client of it: it checks and translates pointers and enqueues its operations here.
 */
#ifndef PYCOMM_DOUBLE_H
#define PYCOMM_DOUBLE_H

#pragma GCC visibility push(default)

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* --- for tests ------------------------------------------------------------------------------- */

/* The after-th next call of `function` returns `code` (1, and 0, is the very next one). Suffixes
 * such as _v2 make no difference. Works for functions of both libraries. */
void double_fail_next(const char *function, int code, int after);
/* How often `function` was called, successfully or not. */
unsigned long long double_calls(const char *function);
/* Every operation starts only after this delay. */
void double_set_delay_us(unsigned microseconds);
/* Live bytes of device memory, of all devices. */
long long double_allocated(void);
/* How many contexts are on the stack of the calling thread. */
int double_context_depth(void);
/* Accesses that no order separates, and the text of the last. */
unsigned long long double_races(void);
const char *double_last_race(void);
void double_reset_races(void);

/* --- for the double of libnccl --------------------------------------------------------------- */

typedef struct {
    CUdeviceptr address;
    size_t bytes;
} double_range;

/* Operations that share an order run in the order in which they were enqueued, on whatever
 * streams. It is an order of execution only: the clocks do not know it. */
typedef struct {
    void *stream;
    unsigned long long sequence;
} double_order;

/* Runs on the thread of its stream, more than once when it was captured. What it returns, unless
 * it is CUDA_SUCCESS, becomes the sticky error of the context. */
typedef CUresult (*double_run)(void *argument);

typedef struct {
    const char *name;
    double_run run;
    void (*release)(void *argument); /* when neither queue nor graph needs the argument any more */
    void *argument;
    const double_range *reads;
    size_t read_count;
    const double_range *writes;
    size_t write_count;
    double_order *order;
} double_operation;

/* Enqueues or captures. Takes the argument over, also when it fails. */
CUresult double_enqueue(CUstream stream, const double_operation *operation);
/* What follows in `waiting` starts after what is in `awaited` now. */
CUresult double_stream_wait(CUstream waiting, CUstream awaited);
/* Whether the stream is usable with the current context; its ordinal of device. */
CUresult double_stream_device(CUstream stream, int *device);
/* Blocks until everything that was enqueued with this order has run. */
void double_order_wait(const double_order *order);
/* Memory of the current device at a multiple of `alignment`; cuMemFree frees it. */
CUresult double_allocate(CUdeviceptr *address, size_t bytes, size_t alignment);
/* The memory behind device (or pinned) memory, NULL when it is not live or not that long. */
void *double_translate(CUdeviceptr address, size_t bytes);
/* The ordinal of the device of live device memory, -1 for anything else. */
int double_memory_device(CUdeviceptr address, size_t bytes);
/* The ordinal of the device of the current context, -1 without one. */
int double_current_device(void);
/* The identity of a visible device. */
CUresult double_device_uuid(int ordinal, unsigned char uuid[16]);
/* Makes the primary context of a device current, which must be active. */
CUresult double_push_device(int ordinal);
void double_pop_device(void);
/* Counts a call; what double_fail_next asked for, else 0. */
int double_called(const char *function);

#pragma GCC visibility pop

#endif

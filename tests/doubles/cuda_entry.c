/* Entry into every function: the lock, the handles, the controls of tests, the names of errors. */
#include "cuda_state.h"

#include <stdio.h>

pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t state_changed = PTHREAD_COND_INITIALIZER;

_Thread_local bool in_host_function;

static bool forked;

/* --- controls -------------------------------------------------------------------------------- */

typedef struct control {
    struct control *next;
    char function[64];
    unsigned long long calls;
    int fail_code;
    int fail_after; /* 0: no failure is due */
} control;

static control *controls;
static pthread_mutex_t controls_lock = PTHREAD_MUTEX_INITIALIZER;

/* The length of a name without _v2 and its like. */
static size_t plain_length(const char *function)
{
    size_t length = strlen(function);
    if (length > 3 && function[length - 3] == '_' && function[length - 2] == 'v')
        return length - 3;
    return length;
}

static control *control_of(const char *function)
{
    size_t length = plain_length(function);
    for (control *found = controls; found; found = found->next)
        if (strlen(found->function) == length && memcmp(found->function, function, length) == 0)
            return found;
    control *created = must_allocate(sizeof *created);
    snprintf(created->function, sizeof created->function, "%.*s", (int)length, function);
    created->next = controls;
    controls = created;
    return created;
}

int double_called(const char *function)
{
    int code = 0;
    pthread_mutex_lock(&controls_lock);
    control *of = control_of(function);
    of->calls++;
    if (of->fail_after > 0 && --of->fail_after == 0)
        code = of->fail_code;
    pthread_mutex_unlock(&controls_lock);
    return code;
}

void double_fail_next(const char *function, int code, int after)
{
    pthread_mutex_lock(&controls_lock);
    control *of = control_of(function);
    of->fail_code = code;
    of->fail_after = after > 1 ? after : 1;
    pthread_mutex_unlock(&controls_lock);
}

unsigned long long double_calls(const char *function)
{
    pthread_mutex_lock(&controls_lock);
    unsigned long long calls = control_of(function)->calls;
    pthread_mutex_unlock(&controls_lock);
    return calls;
}

/* --- entry ----------------------------------------------------------------------------------- */

/* The threads of streams do not survive a fork, and neither does a driver. */
static void in_child(void)
{
    pthread_mutex_init(&state_lock, NULL);
    pthread_mutex_init(&controls_lock, NULL);
    forked = initialised_cuda;
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

CUresult enter(const char *function, bool initialised, int *locked)
{
    int code = double_called(function);
    if (code != 0)
        return (CUresult)code;
    if (in_host_function)
        return CUDA_ERROR_NOT_PERMITTED;
    if (forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&state_lock);
    *locked = 1;
    return initialised && !initialised_cuda ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

void leave(const int *locked)
{
    if (*locked)
        pthread_mutex_unlock(&state_lock);
}

void *must_grow(void *memory, size_t bytes)
{
    void *grown = realloc(memory, bytes ? bytes : 1);
    if (!grown) {
        fputs("double: out of memory\n", stderr);
        abort();
    }
    return grown;
}

void *must_allocate(size_t bytes)
{
    return memset(must_grow(NULL, bytes), 0, bytes);
}

/* --- handles --------------------------------------------------------------------------------- */

/* No mapping lies there: a program that looks behind a handle dies, as it should. */
#define HANDLE_BASE ((uintptr_t)0x0db100000000)

static struct {
    handle_kind kind;
    void *object;
} *handles;
static size_t handle_count, handle_room;

void *handle_new(handle_kind kind, void *object)
{
    if (handle_count == handle_room) {
        handle_room = handle_room ? 2 * handle_room : 64;
        handles = must_grow(handles, handle_room * sizeof *handles);
    }
    handles[handle_count].kind = kind;
    handles[handle_count].object = object;
    return (void *)(HANDLE_BASE + 16 * ++handle_count);
}

static size_t handle_index(const void *handle)
{
    uintptr_t offset = (uintptr_t)handle - HANDLE_BASE;
    if ((uintptr_t)handle <= HANDLE_BASE || offset % 16 != 0 || offset / 16 > handle_count)
        return handle_count;
    return offset / 16 - 1;
}

void *handle_find(handle_kind kind, const void *handle)
{
    size_t index = handle_index(handle);
    return index < handle_count && handles[index].kind == kind ? handles[index].object : NULL;
}

void handle_drop(const void *handle)
{
    size_t index = handle_index(handle);
    if (index < handle_count)
        handles[index].object = NULL;
}

/* --- errors ---------------------------------------------------------------------------------- */

static const struct {
    CUresult code;
    const char *name;
    const char *text;
} errors[] = {
#define ERROR(code, text) {code, #code, text}
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR(CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library"),
    ERROR(CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    ERROR(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    ERROR(CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
          "the provided PTX was compiled with an unsupported toolchain."),
    ERROR(CUDA_ERROR_INVALID_SOURCE, "device kernel image is invalid"),
    ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_ILLEGAL_STATE,
          "the operation cannot be performed in the present state"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch"),
    ERROR(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out and was terminated"),
    ERROR(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE,
          "cannot set while device is active in this process"),
    ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(CUDA_ERROR_ASSERT, "device-side assert triggered"),
    ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
          "part or all of the requested memory range is already mapped"),
    ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
          "pointer does not correspond to a registered memory region"),
    ERROR(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized"),
    ERROR(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
          "system has unsupported display driver / cuda driver combination"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
          "operation not permitted when stream is capturing"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
          "operation failed due to a previous error during capture"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE,
          "operation would result in a merge of separate capture sequences"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
          "dependency created on uncaptured work in another stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(CUDA_ERROR_CAPTURED_EVENT,
          "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
          "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR(CUDA_ERROR_TIMEOUT, "wait operation timed out"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
#undef ERROR
};

CUresult cuGetErrorName(CUresult error, const char **name)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error)
            return *name = errors[i].name, CUDA_SUCCESS;
    *name = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error)
            return *text = errors[i].text, CUDA_SUCCESS;
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

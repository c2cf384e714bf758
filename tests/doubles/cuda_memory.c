/*
 * Memory of devices and pinned memory of the host.
 *
 * The address of device memory lies in one large reservation without access rights: a host that
 * touches it dies as it would on hardware. Operations use other memory that belongs to the address.
 * Addresses are never used twice, so that a stale pointer is always found.
 */
#include "cuda_state.h"

#include <sys/mman.h>
#include <unistd.h>

#define WINDOW_BYTES ((size_t)256 << 30)
#define ALIGNMENT ((size_t)512)
#define GAP ((size_t)65536) /* between allocations: what runs over an end hits nothing */
#define POISON 0xA5         /* of fresh memory */
#define TAIL 0xC3           /* behind an allocation: tells of a kernel that wrote over the end */

static uintptr_t window, window_next;
static long long device_bytes;
static unsigned long long buffer_ids;

static allocation **live; /* sorted by address */
static size_t live_count, live_room;

static struct {
    void *memory;
    size_t bytes;
} *deferred;
static size_t deferred_count;
static int running;

bool in_device_window(uintptr_t address)
{
    return window && address >= window && address < window + WINDOW_BYTES;
}

/* The index of the first allocation that begins after the address. */
static size_t after(uintptr_t address)
{
    size_t low = 0, high = live_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (live[middle]->begin <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

allocation *allocation_at(uintptr_t address)
{
    size_t index = after(address);
    if (index == 0)
        return NULL;
    allocation *found = live[index - 1];
    return address - found->begin < found->bytes ? found : NULL;
}

allocation *allocation_of(uintptr_t address, size_t bytes)
{
    allocation *found = allocation_at(address);
    return found && bytes <= found->bytes - (address - found->begin) ? found : NULL;
}

void *translate(uintptr_t address, size_t bytes)
{
    allocation *found = allocation_of(address, bytes);
    return found ? found->memory + (address - found->begin) : NULL;
}

void *double_translate(CUdeviceptr address, size_t bytes)
{
    pthread_mutex_lock(&state_lock);
    void *memory = translate(address, bytes);
    pthread_mutex_unlock(&state_lock);
    return memory;
}

int double_memory_device(CUdeviceptr address, size_t bytes)
{
    pthread_mutex_lock(&state_lock);
    allocation *found = allocation_of(address, bytes);
    int ordinal = found && found->on_device && !found->freeing ? found->owner->ordinal : -1;
    pthread_mutex_unlock(&state_lock);
    return ordinal;
}

bool tail_intact(uintptr_t address)
{
    allocation *found = allocation_at(address);
    if (found && found->on_device)
        for (size_t i = found->bytes; i < found->mapped; i++)
            if (found->memory[i] != TAIL)
                return false;
    return true;
}

long long double_allocated(void)
{
    pthread_mutex_lock(&state_lock);
    long long bytes = device_bytes;
    pthread_mutex_unlock(&state_lock);
    return bytes;
}

/* --- allocating and freeing ------------------------------------------------------------------ */

static size_t round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

static allocation *add(uintptr_t begin, size_t bytes, void *memory, size_t mapped, context *owner)
{
    allocation *created = must_allocate(sizeof *created);
    created->begin = begin;
    created->bytes = bytes;
    created->memory = memory;
    created->mapped = mapped;
    created->owner = owner;
    created->id = ++buffer_ids;
    if (live_count == live_room) {
        live_room = live_room ? 2 * live_room : 64;
        live = must_grow(live, live_room * sizeof(allocation *));
    }
    size_t index = after(begin);
    memmove(live + index + 1, live + index, (live_count - index) * sizeof *live);
    live[index] = created;
    live_count++;
    return created;
}

static CUresult allocate(context *owner, size_t bytes, size_t alignment, allocation **created)
{
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!window) {
        void *reserved = mmap(NULL, WINDOW_BYTES, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (reserved == MAP_FAILED)
            return CUDA_ERROR_OUT_OF_MEMORY;
        window = window_next = (uintptr_t)reserved;
    }
    if (bytes > DEVICE_BYTES - owner->on->used ||
        bytes > WINDOW_BYTES - (window_next - window) - GAP - 2 * alignment)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t mapped = round_up(bytes, (size_t)sysconf(_SC_PAGESIZE));
    void *memory =
        mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    window_next = round_up(window_next, alignment);
    memset(memory, POISON, bytes);
    memset((char *)memory + bytes, TAIL, mapped - bytes);
    *created = add(window_next, bytes, memory, mapped, owner);
    (*created)->on_device = true;
    window_next += round_up(bytes, alignment) + GAP;
    owner->on->used += bytes;
    device_bytes += (long long)bytes;
    return CUDA_SUCCESS;
}

void operations_running(int change)
{
    running += change;
    if (running > 0)
        return;
    for (size_t i = 0; i < deferred_count; i++)
        munmap(deferred[i].memory, deferred[i].bytes);
    deferred_count = 0;
}

void allocation_free(allocation *freed)
{
    size_t index = after(freed->begin) - 1;
    memmove(live + index, live + index + 1, (--live_count - index) * sizeof *live);
    if (freed->on_device) {
        freed->owner->on->used -= freed->bytes;
        device_bytes -= (long long)freed->bytes;
    }
    if (!freed->registered) {
        deferred = must_grow(deferred, (deferred_count + 1) * sizeof *deferred);
        deferred[deferred_count].memory = freed->memory;
        deferred[deferred_count++].bytes = freed->mapped;
        operations_running(0);
    }
    free(freed->accesses.entries);
    free(freed);
}

void free_context_memory(const context *owner)
{
    for (size_t i = live_count; i-- > 0;)
        if (live[i]->owner == owner)
            allocation_free(live[i]);
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes)
{
    ENTER_CONTEXT(current);
    TRY(unsafe_call());
    allocation *created;
    TRY(allocate(current, bytes, ALIGNMENT, &created));
    *address = created->begin;
    return CUDA_SUCCESS;
}

CUresult double_allocate(CUdeviceptr *address, size_t bytes, size_t alignment)
{
    context *current;
    allocation *created;
    pthread_mutex_lock(&state_lock);
    CUresult error = current_context(&current);
    if (error == CUDA_SUCCESS)
        error = unsafe_call();
    if (error == CUDA_SUCCESS)
        error = allocate(current, bytes, alignment, &created);
    if (error == CUDA_SUCCESS)
        *address = created->begin;
    pthread_mutex_unlock(&state_lock);
    return error;
}

CUresult cuMemFree(CUdeviceptr address)
{
    ENTER_CONTEXT(current);
    if (!address)
        return CUDA_SUCCESS;
    TRY(unsafe_call());
    allocation *freed = allocation_at(address);
    if (!freed || !freed->on_device || freed->begin != address || freed->freeing)
        return CUDA_ERROR_INVALID_VALUE;
    freed->freeing = true;
    context *owner = freed->owner;
    /* As the driver does: memory goes when nothing runs that may use it. */
    for (stream *of = owner->streams; of; of = of->next)
        stream_synchronise(of);
    freed = allocation_at(address);
    if (freed)
        allocation_free(freed);
    return usable_context(current);
}


static CUresult run_nothing(void *argument)
{
    (void)argument;
    return CUDA_SUCCESS;
}

static CUresult run_free(void *argument)
{
    pthread_mutex_lock(&state_lock);
    allocation *freed = allocation_at((uintptr_t)argument);
    if (freed)
        allocation_free(freed);
    pthread_mutex_unlock(&state_lock);
    return CUDA_SUCCESS;
}

/* Both count as a write of everything: another stream must be ordered behind or before it. */
static CUresult submit_whole(stream *on, const allocation *of, const char *name, double_run run)
{
    body *what = body_new(name, run, NULL, (void *)of->begin);
    double_range whole = {of->begin, of->bytes};
    body_ranges(what, NULL, 0, &whole, 1);
    return stream_submit(on, what);
}

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream handle)
{
    ENTER();
    stream *on;
    TRY(stream_find(handle, &on));
    if (on->capturing)
        return CUDA_ERROR_NOT_SUPPORTED; /* nodes of memory are not doubled */
    allocation *created;
    TRY(allocate(on->of, bytes, ALIGNMENT, &created));
    *address = created->begin;
    return submit_whole(on, created, "cuMemAllocAsync", run_nothing);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle)
{
    ENTER();
    stream *on;
    TRY(stream_find(handle, &on));
    if (!address)
        return CUDA_SUCCESS;
    if (on->capturing)
        return CUDA_ERROR_NOT_SUPPORTED;
    allocation *freed = allocation_at(address);
    if (!freed || !freed->on_device || freed->begin != address || freed->freeing)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult error = submit_whole(on, freed, "cuMemFreeAsync", run_free);
    freed->freeing = error == CUDA_SUCCESS;
    return error;
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total)
{
    ENTER_CONTEXT(current);
    *total = DEVICE_BYTES;
    *free_bytes = DEVICE_BYTES - current->on->used;
    return CUDA_SUCCESS;
}

/* --- pinned memory --------------------------------------------------------------------------- */

CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags)
{
    ENTER_CONTEXT(current);
    TRY(unsafe_call());
    if (bytes == 0 || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    size_t mapped = round_up(bytes, (size_t)sysconf(_SC_PAGESIZE));
    *memory = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(*memory, POISON, bytes);
    add((uintptr_t)*memory, bytes, *memory, mapped, current);
    return CUDA_SUCCESS;
}

CUresult cuMemAllocHost(void **memory, size_t bytes)
{
    return cuMemHostAlloc(memory, bytes, 0);
}

CUresult cuMemFreeHost(void *memory)
{
    ENTER();
    TRY(unsafe_call());
    allocation *freed = allocation_at((uintptr_t)memory);
    if (!freed || freed->on_device || freed->registered || freed->begin != (uintptr_t)memory)
        return CUDA_ERROR_INVALID_VALUE;
    for (stream *of = freed->owner->streams; of; of = of->next)
        stream_synchronise(of);
    freed = allocation_at((uintptr_t)memory);
    if (freed)
        allocation_free(freed);
    return CUDA_SUCCESS;
}

CUresult cuMemHostRegister(void *memory, size_t bytes, unsigned int flags)
{
    ENTER_CONTEXT(current);
    TRY(unsafe_call());
    uintptr_t begin = (uintptr_t)memory;
    if (!memory || bytes == 0 || flags > 15 || in_device_window(begin))
        return CUDA_ERROR_INVALID_VALUE;
    size_t index = after(begin + bytes - 1);
    if (index > 0 && live[index - 1]->begin + live[index - 1]->bytes > begin)
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    add(begin, bytes, memory, 0, current)->registered = true;
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *memory)
{
    ENTER_CONTEXT(current);
    TRY(unsafe_call());
    allocation *found = allocation_at((uintptr_t)memory);
    if (!found || !found->registered || found->begin != (uintptr_t)memory)
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    allocation_free(found);
    return usable_context(current);
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *address, void *memory, unsigned int flags)
{
    ENTER_CONTEXT(current);
    allocation *found = allocation_at((uintptr_t)memory);
    if (flags != 0 || !found || found->on_device)
        return CUDA_ERROR_INVALID_VALUE;
    *address = (CUdeviceptr)memory;
    return usable_context(current);
}

/* Copying and filling memory. */
#include "cuda_state.h"

typedef enum { HOST, DEVICE, ANY } side;

typedef struct {
    uintptr_t target, source;
    size_t bytes;
    unsigned fill;
    unsigned width;       /* of what fills; 0: a copy */
    unsigned char staged[]; /* pageable source: what it held at the call */
} transfer;

/* The memory behind an address of whichever kind; NULL: device memory that is not there. */
static void *resolve(uintptr_t address, size_t bytes)
{
    void *memory = translate(address, bytes);
    if (memory || in_device_window(address))
        return memory;
    return (void *)address;
}

static CUresult run_transfer(void *argument)
{
    transfer *moved = argument;
    pthread_mutex_lock(&state_lock);
    char *target = resolve(moved->target, moved->bytes);
    const void *source = NULL;
    if (!moved->width)
        source = moved->source ? resolve(moved->source, moved->bytes) : moved->staged;
    pthread_mutex_unlock(&state_lock);
    if (!target || (!moved->width && !source))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (!moved->width)
        memmove(target, source, moved->bytes);
    else if (moved->width == 1)
        memset(target, (int)moved->fill, moved->bytes);
    else
        for (size_t i = 0; i + 4 <= moved->bytes; i += 4)
            memcpy(target + i, &moved->fill, 4);
    return CUDA_SUCCESS;
}

static CUresult check_side(uintptr_t address, size_t bytes, side expected)
{
    allocation *of = allocation_of(address, bytes);
    bool device_address = in_device_window(address);
    if (!address || (of && of->freeing))
        return CUDA_ERROR_INVALID_VALUE;
    if (device_address && !of)
        return CUDA_ERROR_INVALID_VALUE;
    if (!of && allocation_at(address))
        return CUDA_ERROR_INVALID_VALUE; /* begins in pinned memory and runs over its end */
    if (expected == DEVICE && !of) /* pinned memory passes: its address is one of the device too */
        return CUDA_ERROR_INVALID_VALUE;
    if (expected == HOST && device_address)
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

static bool pageable(uintptr_t address)
{
    return !in_device_window(address) && !allocation_at(address);
}

static CUresult copy(const char *name, CUstream handle, bool wait, uintptr_t target,
                     side target_side, uintptr_t source, side source_side, size_t bytes)
{
    stream *on;
    TRY(stream_find(handle, &on));
    if (bytes == 0)
        return CUDA_SUCCESS;
    TRY(check_side(target, bytes, target_side));
    TRY(check_side(source, bytes, source_side));
    bool staged = pageable(source), blocks = wait || pageable(target);
    if (staged || blocks)
        TRY(capture_forbids(on));
    transfer *moved = must_allocate(sizeof *moved + (staged ? bytes : 0));
    moved->target = target;
    moved->bytes = bytes;
    if (staged)
        memcpy(moved->staged, (const void *)source, bytes);
    else
        moved->source = source;
    body *what = body_new(name, run_transfer, free, moved);
    double_range reads = {source, bytes}, writes = {target, bytes};
    body_ranges(what, &reads, 1, &writes, 1);
    TRY(stream_submit(on, what));
    if (blocks)
        stream_synchronise(on);
    return on->of->sticky;
}

static CUresult fill(const char *name, CUstream handle, bool wait, uintptr_t target, unsigned value,
                     unsigned width, size_t count)
{
    stream *on;
    TRY(stream_find(handle, &on));
    size_t bytes = count * width;
    if (bytes == 0)
        return CUDA_SUCCESS;
    if (target % width != 0)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(check_side(target, bytes, DEVICE));
    transfer *moved = must_allocate(sizeof *moved);
    *moved = (transfer){.target = target, .bytes = bytes, .fill = value, .width = width};
    body *what = body_new(name, run_transfer, free, moved);
    double_range writes = {target, bytes};
    body_ranges(what, NULL, 0, &writes, 1);
    TRY(stream_submit(on, what));
    if (wait)
        stream_synchronise(on);
    return on->of->sticky;
}

CUresult cuMemcpyHtoD(CUdeviceptr target, const void *source, size_t bytes)
{
    ENTER();
    return copy("cuMemcpyHtoD", NULL, true, target, DEVICE, (uintptr_t)source, HOST, bytes);
}

CUresult cuMemcpyDtoH(void *target, CUdeviceptr source, size_t bytes)
{
    ENTER();
    return copy("cuMemcpyDtoH", NULL, true, (uintptr_t)target, HOST, source, DEVICE, bytes);
}

CUresult cuMemcpyDtoD(CUdeviceptr target, CUdeviceptr source, size_t bytes)
{
    ENTER();
    return copy("cuMemcpyDtoD", NULL, false, target, DEVICE, source, DEVICE, bytes);
}

CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t bytes)
{
    ENTER();
    bool wait = !in_device_window(target) || !in_device_window(source);
    return copy("cuMemcpy", NULL, wait, target, ANY, source, ANY, bytes);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void *source, size_t bytes, CUstream on)
{
    ENTER();
    return copy("cuMemcpyHtoDAsync", on, false, target, DEVICE, (uintptr_t)source, HOST, bytes);
}

CUresult cuMemcpyDtoHAsync(void *target, CUdeviceptr source, size_t bytes, CUstream on)
{
    ENTER();
    return copy("cuMemcpyDtoHAsync", on, false, (uintptr_t)target, HOST, source, DEVICE, bytes);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream on)
{
    ENTER();
    return copy("cuMemcpyDtoDAsync", on, false, target, DEVICE, source, DEVICE, bytes);
}

CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream on)
{
    ENTER();
    return copy("cuMemcpyAsync", on, false, target, ANY, source, ANY, bytes);
}

CUresult cuMemsetD8(CUdeviceptr target, unsigned char value, size_t count)
{
    ENTER();
    return fill("cuMemsetD8", NULL, false, target, value, 1, count);
}

CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t count, CUstream on)
{
    ENTER();
    return fill("cuMemsetD8Async", on, false, target, value, 1, count);
}

CUresult cuMemsetD32Async(CUdeviceptr target, unsigned int value, size_t count, CUstream on)
{
    ENTER();
    return fill("cuMemsetD32Async", on, false, target, value, 4, count);
}

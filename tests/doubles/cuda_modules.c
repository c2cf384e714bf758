/*
 * Modules and kernels.
 *
 * A kernel is its own source compiled for the host (see kernel_shim.h) in the library that
 * PYCOMM_DOUBLE_KERNELS names. What a module is loaded from is only looked at, never run.
 */
#include "cuda_state.h"

#include <dlfcn.h>
#include <stdio.h>

typedef void (*launcher)(void **parameters, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z);
typedef const size_t *(*sizes_of)(unsigned *count);

typedef struct {
    CUmodule handle;
    context *of;
} module;

typedef struct {
    CUfunction handle;
    module *in;
    char name[128];
    launcher launch;
    const size_t *sizes;
    unsigned count;
} function;

typedef struct {
    function *launched;
    context *of;
    unsigned grid[3], block[3];
    size_t *offsets; /* of the parameters in values */
    unsigned char values[];
} launch_call;

CUresult cuModuleLoadData(CUmodule *handle, const void *image)
{
    ENTER_CONTEXT(current);
    if (!handle || !image)
        return CUDA_ERROR_INVALID_VALUE;
    bool elf = memcmp(image, "\177ELF", 4) == 0;
    static const unsigned char fat[] = {0x50, 0xed, 0x55, 0xba};
    if (!elf && memcmp(image, fat, 4) != 0) {
        const char *text = image; /* PTX is text that ends with a zero */
        for (const char *at = text; *at; at++)
            if ((signed char)*at < 9)
                return CUDA_ERROR_INVALID_IMAGE;
        if (!strstr(text, ".version"))
            return CUDA_ERROR_INVALID_IMAGE;
        if (!strstr(text, ".target"))
            return CUDA_ERROR_INVALID_PTX;
    }
    module *created = must_allocate(sizeof *created);
    created->of = current;
    *handle = created->handle = handle_new(MODULE, created);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *handle, const void *image, unsigned int count,
                            CUjit_option *options, void **values)
{
    if (count && (!options || !values))
        return CUDA_ERROR_INVALID_VALUE;
    int code = double_called(__func__);
    return code ? (CUresult)code : cuModuleLoadData(handle, image);
}

CUresult cuModuleUnload(CUmodule handle)
{
    ENTER_CONTEXT(current);
    module *gone = handle_find(MODULE, handle);
    if (!gone)
        return CUDA_ERROR_INVALID_HANDLE;
    handle_drop(handle);
    gone->handle = NULL;
    return usable_context(current);
}

static void *kernel_symbol(const char *prefix, const char *name)
{
    static void *library;
    const char *path = getenv("PYCOMM_DOUBLE_KERNELS");
    char symbol[192];
    if (!library && path)
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    snprintf(symbol, sizeof symbol, "%s%s", prefix, name);
    return library ? dlsym(library, symbol) : NULL;
}

CUresult cuModuleGetFunction(CUfunction *handle, CUmodule in_handle, const char *name)
{
    ENTER_CONTEXT(current);
    module *in = handle_find(MODULE, in_handle);
    if (!in)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!handle || !name || strlen(name) >= 128)
        return CUDA_ERROR_INVALID_VALUE;
    launcher launch = (launcher)kernel_symbol("double_launch_", name);
    sizes_of sizes = (sizes_of)kernel_symbol("double_parameters_", name);
    if (!launch || !sizes)
        return CUDA_ERROR_NOT_FOUND;
    function *created = must_allocate(sizeof *created);
    created->in = in;
    created->launch = launch;
    created->sizes = sizes(&created->count);
    snprintf(created->name, sizeof created->name, "%s", name);
    *handle = created->handle = handle_new(FUNCTION, created);
    return usable_context(current);
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle)
{
    ENTER();
    if (!handle_find(FUNCTION, handle))
        return CUDA_ERROR_INVALID_HANDLE;
    switch ((int)attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 90; break;
    default: *value = 0; break;
    }
    return CUDA_SUCCESS;
}

/* Addresses of the device among the values become the memory behind them; false: one is not live
 * or belongs to another device. */
static bool translate_values(launch_call *call, unsigned char *values, size_t bytes,
                             uintptr_t *touched, size_t *touched_count)
{
    for (size_t at = 0; at + sizeof(uintptr_t) <= bytes; at += sizeof(uintptr_t)) {
        uintptr_t address;
        memcpy(&address, values + at, sizeof address);
        if (!in_device_window(address))
            continue;
        allocation *of = allocation_at(address);
        if (!of || of->owner != call->of)
            return false;
        touched[(*touched_count)++] = address;
        address = (uintptr_t)of->memory + (address - of->begin);
        memcpy(values + at, &address, sizeof address);
    }
    return true;
}

static size_t values_bytes(const function *of)
{
    size_t bytes = 0;
    for (unsigned i = 0; i < of->count; i++)
        bytes += (of->sizes[i] + 15) / 16 * 16; /* every parameter is aligned for any type */
    return bytes;
}

static CUresult run_launch(void *argument)
{
    launch_call *call = argument;
    function *of = call->launched;
    size_t bytes = values_bytes(of);
    unsigned char *values = must_allocate(bytes);
    void **parameters = must_allocate(of->count * sizeof *parameters);
    uintptr_t *touched = must_allocate(bytes);
    size_t touched_count = 0;
    memcpy(values, call->values, bytes);
    pthread_mutex_lock(&state_lock);
    bool good = translate_values(call, values, bytes, touched, &touched_count);
    pthread_mutex_unlock(&state_lock);
    if (good) {
        for (unsigned i = 0; i < of->count; i++)
            parameters[i] = values + call->offsets[i];
        of->launch(parameters, call->grid[0], call->grid[1], call->grid[2], call->block[0],
                   call->block[1], call->block[2]);
        pthread_mutex_lock(&state_lock);
        for (size_t i = 0; i < touched_count; i++)
            good &= tail_intact(touched[i]);
        pthread_mutex_unlock(&state_lock);
    }
    free(values);
    free(parameters);
    free(touched);
    return good ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

static void release_launch(void *argument)
{
    launch_call *call = argument;
    free(call->offsets);
    free(call);
}

CUresult cuLaunchKernel(CUfunction handle, unsigned int grid_x, unsigned int grid_y,
                        unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                        unsigned int block_z, unsigned int shared_bytes, CUstream on_handle,
                        void **parameters, void **extra)
{
    ENTER();
    stream *on;
    TRY(stream_for_launch(on_handle, &on));
    function *of = handle_find(FUNCTION, handle);
    if (!of || !of->in->handle)
        return CUDA_ERROR_INVALID_HANDLE;
    if (of->in->of != on->of)
        return CUDA_ERROR_INVALID_HANDLE;
    if (extra)
        return CUDA_ERROR_NOT_SUPPORTED; /* parameters in one packed buffer are not doubled */
    if ((of->count && !parameters) || shared_bytes > 48 * 1024)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned long long threads = (unsigned long long)block_x * block_y * block_z;
    if (!grid_x || !grid_y || !grid_z || !threads || threads > 1024 || block_z > 64 ||
        grid_x > 0x7fffffff || grid_y > 65535 || grid_z > 65535)
        return CUDA_ERROR_INVALID_VALUE;
    launch_call *call = must_allocate(sizeof *call + values_bytes(of));
    call->launched = of;
    call->of = on->of;
    call->offsets = must_allocate(of->count * sizeof *call->offsets);
    memcpy(call->grid, (unsigned[]){grid_x, grid_y, grid_z}, sizeof call->grid);
    memcpy(call->block, (unsigned[]){block_x, block_y, block_z}, sizeof call->block);
    size_t at = 0;
    for (unsigned i = 0; i < of->count; i++) {
        call->offsets[i] = at;
        memcpy(call->values + at, parameters[i], of->sizes[i]);
        at += (of->sizes[i] + 15) / 16 * 16;
    }
    return stream_submit(on, body_new(of->name, run_launch, release_launch, call));
}

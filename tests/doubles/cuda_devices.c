/* Devices and their primary contexts. */
#include "cuda_state.h"

#include <stdio.h>
#include <unistd.h>

device devices[MAX_DEVICES];
int device_count;
bool initialised_cuda;

static _Thread_local CUcontext stack[MAX_DEPTH];
static _Thread_local int depth;

/* --- devices --------------------------------------------------------------------------------- */

/* The same in all processes of a host, and another on every host. */
static void make_uuid(int physical, unsigned char uuid[16])
{
    char host[256] = "";
    const char *named = getenv("PYCOMM_DOUBLE_HOST");
    if (named)
        snprintf(host, sizeof host, "%s", named);
    else
        gethostname(host, sizeof host - 1);
    uint64_t hash = 1469598103934665603ull;
    for (const char *at = host; *at; at++)
        hash = (hash ^ (unsigned char)*at) * 1099511628211ull;
    memcpy(uuid, "double", 6);
    uuid[6] = 0x40;
    uuid[7] = (unsigned char)physical;
    memcpy(uuid + 8, &hash, 8);
}

static void uuid_text(const unsigned char uuid[16], char text[48])
{
    char *at = text + sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        at += sprintf(at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
}

/* The physical device that an entry of CUDA_VISIBLE_DEVICES means; -1: none. */
static int visible_entry(const char *entry, int physical_count)
{
    while (*entry == ' ')
        entry++;
    if (strncmp(entry, "GPU-", 4) == 0) {
        for (int i = 0; i < physical_count; i++) {
            unsigned char uuid[16];
            char text[48];
            make_uuid(i, uuid);
            uuid_text(uuid, text);
            if (strncmp(text, entry, strlen(entry)) == 0) /* a prefix is enough */
                return i;
        }
        return -1;
    }
    char *end;
    long ordinal = strtol(entry, &end, 10);
    if (end == entry || ordinal < 0 || ordinal >= physical_count)
        return -1;
    return (int)ordinal;
}

CUresult start_devices(void)
{
    const char *asked = getenv("PYCOMM_DOUBLE_DEVICES");
    int physical_count = asked ? atoi(asked) : 4;
    if (physical_count > MAX_DEVICES)
        physical_count = MAX_DEVICES;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    device_count = 0;
    if (!visible) {
        for (int i = 0; i < physical_count; i++)
            devices[device_count++].physical = i;
    } else {
        char list[1024];
        snprintf(list, sizeof list, "%s", visible);
        char *rest = list;
        for (char *entry; (entry = strsep(&rest, ",")) && device_count < MAX_DEVICES;) {
            int physical = visible_entry(entry, physical_count);
            for (int i = 0; i < device_count; i++)
                if (devices[i].physical == physical)
                    physical = -1;
            if (physical < 0) /* the first that is wrong hides all that follow */
                break;
            devices[device_count++].physical = physical;
        }
    }
    for (int i = 0; i < device_count; i++)
        make_uuid(devices[i].physical, devices[i].uuid);
    return device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuInit(unsigned int flags)
{
    ENTER_WHEN(false);
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (initialised_cuda)
        return CUDA_SUCCESS;
    TRY(start_devices());
    const char *delay = getenv("PYCOMM_DOUBLE_DELAY_US");
    if (delay)
        double_set_delay_us((unsigned)strtoul(delay, NULL, 10));
    initialised_cuda = true;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version)
{
    ENTER_WHEN(false);
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

static CUresult device_find(CUdevice ordinal, device **found)
{
    if (ordinal < 0 || ordinal >= device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    *found = &devices[ordinal];
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
    ENTER();
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = device_count;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *found, int ordinal)
{
    ENTER();
    device *of;
    TRY(device_find(ordinal, &of));
    *found = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice ordinal)
{
    ENTER();
    device *of;
    TRY(device_find(ordinal, &of));
    snprintf(name, (size_t)length, "Double of a GPU %d", of->physical);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice ordinal)
{
    ENTER();
    device *of;
    TRY(device_find(ordinal, &of));
    memcpy(uuid->bytes, of->uuid, sizeof of->uuid);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice ordinal)
{
    return cuDeviceGetUuid(uuid, ordinal);
}

CUresult double_device_uuid(int ordinal, unsigned char uuid[16])
{
    pthread_mutex_lock(&state_lock);
    device *of;
    CUresult error = device_find(ordinal, &of);
    if (error == CUDA_SUCCESS)
        memcpy(uuid, of->uuid, 16);
    pthread_mutex_unlock(&state_lock);
    return error;
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice ordinal)
{
    ENTER();
    device *of;
    TRY(device_find(ordinal, &of));
    if (length < 13)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(text, (size_t)length, "0000:%02X:00.0", 0x10 + of->physical);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice ordinal)
{
    ENTER();
    device *of;
    TRY(device_find(ordinal, &of));
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 4; break; /* small grids: host cores */
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 0x7fffffff; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = 0x10 + of->physical; break;
    default: *value = 0; break; /* also the device and the domain of PCI */
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice ordinal)
{
    ENTER();
    device *of;
    TRY(device_find(ordinal, &of));
    *bytes = DEVICE_BYTES;
    return CUDA_SUCCESS;
}

/* --- contexts -------------------------------------------------------------------------------- */

CUresult usable_context(const context *used)
{
    if (used->destroyed)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return used->sticky;
}

CUresult current_context(context **found)
{
    if (depth == 0 || !stack[depth - 1])
        return CUDA_ERROR_INVALID_CONTEXT;
    *found = handle_find(CONTEXT, stack[depth - 1]);
    return *found ? usable_context(*found) : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

int double_current_device(void)
{
    context *current;
    pthread_mutex_lock(&state_lock);
    CUresult error = current_context(&current);
    int ordinal = error == CUDA_SUCCESS ? current->ordinal : -1;
    pthread_mutex_unlock(&state_lock);
    return ordinal;
}

int double_context_depth(void)
{
    return depth;
}

static context *primary_retain(int ordinal)
{
    device *on = &devices[ordinal];
    if (on->retained++ == 0) {
        on->primary = must_allocate(sizeof *on->primary);
        on->primary->on = on;
        on->primary->ordinal = ordinal;
        on->primary->handle = handle_new(CONTEXT, on->primary);
        on->primary->legacy = stream_new(on->primary, CU_STREAM_DEFAULT, 0);
    }
    return on->primary;
}

CUresult double_push_device(int ordinal)
{
    pthread_mutex_lock(&state_lock);
    device *on;
    CUresult error = device_find(ordinal, &on);
    if (error == CUDA_SUCCESS)
        error = on->primary && depth < MAX_DEPTH ? usable_context(on->primary)
                                                 : CUDA_ERROR_INVALID_CONTEXT;
    if (error == CUDA_SUCCESS)
        stack[depth++] = on->primary->handle;
    pthread_mutex_unlock(&state_lock);
    return error;
}

void double_pop_device(void)
{
    depth--;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice ordinal)
{
    ENTER();
    device *on;
    TRY(device_find(ordinal, &on));
    *found = primary_retain(ordinal)->handle;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice ordinal)
{
    ENTER();
    device *on;
    TRY(device_find(ordinal, &on));
    if (on->retained == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (--on->retained > 0)
        return CUDA_SUCCESS;
    context *gone = on->primary;
    gone->destroyed = true; /* queued operations complete without running */
    for (stream *of = gone->streams; of; of = of->next) {
        of->destroyed = true;
        handle_drop(of->handle);
    }
    handle_drop(gone->handle);
    free_context_memory(gone);
    on->primary = NULL;
    pthread_cond_broadcast(&state_changed);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned int *flags, int *active)
{
    ENTER();
    device *on;
    TRY(device_find(ordinal, &on));
    *flags = 0;
    *active = on->retained > 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *found)
{
    ENTER();
    *found = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext handle)
{
    ENTER();
    if (!handle) {
        depth -= depth > 0;
        return CUDA_SUCCESS;
    }
    if (!handle_find(CONTEXT, handle))
        return CUDA_ERROR_INVALID_CONTEXT;
    depth += depth == 0;
    stack[depth - 1] = handle;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext handle)
{
    ENTER();
    if (!handle_find(CONTEXT, handle))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == MAX_DEPTH)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stack[depth++] = handle;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *popped)
{
    ENTER();
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (popped)
        *popped = stack[depth];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *ordinal)
{
    ENTER();
    context *current = depth ? handle_find(CONTEXT, stack[depth - 1]) : NULL;
    if (!current)
        return CUDA_ERROR_INVALID_CONTEXT;
    *ordinal = current->ordinal;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER_CONTEXT(current);
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return usable_context(current);
}

CUresult cuCtxSynchronize(void)
{
    ENTER_CONTEXT(current);
    TRY(capture_forbids_context(current));
    TRY(unsafe_call());
    for (stream *of = current->streams; of; of = of->next)
        stream_synchronise(of);
    return usable_context(current);
}

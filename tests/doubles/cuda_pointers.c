/* What a pointer points to. */
#include "cuda_state.h"

static CUresult attribute_of(void *data, CUpointer_attribute attribute, CUdeviceptr pointer,
                             bool unknown_is_error)
{
    allocation *of = allocation_at(pointer);
    if (!of && unknown_is_error)
        return CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = of ? of->owner->handle : NULL;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data =
            !of ? 0 : of->on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = of ? pointer : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (of && of->on_device && unknown_is_error)
            return CUDA_ERROR_INVALID_VALUE;
        *(void **)data = of && !of->on_device ? (void *)pointer : NULL;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)data = of ? of->id : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)data = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = of ? of->owner->ordinal : (int)CU_DEVICE_INVALID;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = of ? of->begin : 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = of ? of->bytes : 0;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer)
{
    ENTER();
    if (!data)
        return CUDA_ERROR_INVALID_VALUE;
    return attribute_of(data, attribute, pointer, true);
}

/* Unlike its sibling it knows an answer for pointers that CUDA never saw. */
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data,
                                CUdeviceptr pointer)
{
    ENTER();
    if (!attributes || !data)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        TRY(attribute_of(data[i], attributes[i], pointer, false));
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer)
{
    ENTER_CONTEXT(current);
    allocation *of = allocation_at(pointer);
    if (!of || !of->on_device)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = of->begin;
    if (bytes)
        *bytes = of->bytes;
    return usable_context(current);
}

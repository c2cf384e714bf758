/* Errors and their texts, versions, memory, parameters. */
#include "nccl_state.h"

#include <unistd.h>

static pthread_mutex_t text_lock = PTHREAD_MUTEX_INITIALIZER;
static char last_error[1024];
static char last_misuse[512];
static unsigned long long misuses;

ncclResult_t fail(ncclResult_t code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&text_lock);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    pthread_mutex_unlock(&text_lock);
    va_end(arguments);
    return code;
}

void misuse(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&text_lock);
    misuses++;
    vsnprintf(last_misuse, sizeof last_misuse, format, arguments);
    pthread_mutex_unlock(&text_lock);
    va_end(arguments);
}

unsigned long long double_misuse(void)
{
    pthread_mutex_lock(&text_lock);
    unsigned long long count = misuses;
    pthread_mutex_unlock(&text_lock);
    return count;
}

static const char *copied(const char *text, size_t bytes)
{
    static _Thread_local char copy[sizeof last_error];
    pthread_mutex_lock(&text_lock);
    memcpy(copy, text, bytes);
    pthread_mutex_unlock(&text_lock);
    return copy;
}

const char *double_last_misuse(void)
{
    return copied(last_misuse, sizeof last_misuse);
}

/* Of the process, as in the library: the communicator makes no difference. */
const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return copied(last_error, sizeof last_error);
}

const char *ncclGetErrorString(ncclResult_t code)
{
    switch ((int)code) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
        return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    case ncclTimeout: return DOUBLE_NCCL_VERSION >= 23200 ? "timeout" : "unknown result code";
    default: return "unknown result code";
    }
}

ncclResult_t cuda_failure(CUresult error)
{
    const char *text = NULL;
    if (error == CUDA_SUCCESS)
        return ncclSuccess;
    cuGetErrorString(error, &text);
    return fail(ncclUnhandledCudaError, "Cuda failure %d '%s'", (int)error, text ? text : "?");
}

void *allocate(size_t bytes)
{
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory) {
        fputs("double: out of memory\n", stderr);
        abort();
    }
    return memory;
}

size_t type_bytes(ncclDataType_t datatype)
{
    static const size_t bytes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return (unsigned)datatype < ncclNumTypes ? bytes[datatype] : 0;
}

ncclResult_t ncclGetVersion(int *version)
{
    ENTER();
    if (!version)
        return fail(ncclInvalidArgument, "GetVersion: version is NULL");
    *version = DOUBLE_NCCL_VERSION;
    return ncclSuccess;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
void ncclResetDebugInit() {}
#pragma GCC diagnostic pop

ncclResult_t ncclMemAlloc(void **memory, size_t bytes)
{
    ENTER();
    CUdeviceptr address = 0;
    if (!memory || bytes == 0)
        return fail(ncclInvalidArgument, "MemAlloc: no pointer or no bytes");
    TRY(cuda_failure(double_allocate(&address, bytes, NCCL_WIN_REQUIRED_ALIGNMENT)));
    *memory = (void *)address;
    return ncclSuccess;
}

ncclResult_t ncclMemFree(void *memory)
{
    ENTER();
    return cuda_failure(cuMemFree((CUdeviceptr)memory));
}

ncclResult_t ncclSetEncryption(const ncclEncryptionConfig_t *config)
{
    ENTER();
    if (!config || config->size != sizeof *config || config->magic != NCCL_API_MAGIC)
        return fail(ncclInvalidArgument, "SetEncryption: not an initialised config");
    if (config->mode != NCCL_ENCRYPTION_MODE_NONE)
        return fail(ncclInvalidUsage, "SetEncryption: the double does not encrypt");
    return ncclSuccess;
}

/* --- parameters ------------------------------------------------------------------------------ */

/* A handle is a name of this table; a parameter has what its variable holds, else 0 or "". */
static const char *parameters[] = {"NCCL_ALGO",           "NCCL_BUFFSIZE",  "NCCL_CTA_POLICY",
                                   "NCCL_CUMEM_ENABLE",   "NCCL_DEBUG",     "NCCL_MAX_CTAS",
                                   "NCCL_MIN_CTAS",       "NCCL_NTHREADS",  "NCCL_PROTO",
                                   "NCCL_SOCKET_IFNAME",  "NCCL_NVLS_ENABLE"};
#define PARAMETERS ((int)(sizeof parameters / sizeof *parameters))

static const char *value_of(ncclParamHandle_t handle)
{
    for (int i = 0; i < PARAMETERS; i++)
        if ((const void *)handle == parameters[i]) {
            const char *value = getenv(parameters[i]);
            return value ? value : "";
        }
    return NULL;
}

ncclResult_t ncclParamBind(ncclParamHandle_t *out, const char *key)
{
    ENTER();
    for (int i = 0; out && key && i < PARAMETERS; i++)
        if (strcmp(key, parameters[i]) == 0) {
            *out = (ncclParamHandle_t)parameters[i];
            return ncclSuccess;
        }
    return fail(ncclInvalidArgument, "ParamBind: no parameter of that name");
}

#define PARAMETER_AS(suffix, type, convert)                                    \
    ncclResult_t ncclParamGet##suffix(ncclParamHandle_t handle, type *out)     \
    {                                                                          \
        ENTER();                                                               \
        const char *value = value_of(handle);                                  \
        if (!value || !out)                                                    \
            return fail(ncclInvalidArgument, "ParamGet: not a parameter");     \
        *out = (type)convert(value, NULL, 0);                                  \
        return ncclSuccess;                                                    \
    }
PARAMETER_AS(I8, int8_t, strtoll)
PARAMETER_AS(I16, int16_t, strtoll)
PARAMETER_AS(I32, int32_t, strtoll)
PARAMETER_AS(I64, int64_t, strtoll)
PARAMETER_AS(U8, uint8_t, strtoull)
PARAMETER_AS(U16, uint16_t, strtoull)
PARAMETER_AS(U32, uint32_t, strtoull)
PARAMETER_AS(U64, uint64_t, strtoull)

ncclResult_t ncclParamGetStr(ncclParamHandle_t handle, const char **out)
{
    ENTER();
    const char *value = value_of(handle);
    if (!value || !out)
        return fail(ncclInvalidArgument, "ParamGet: not a parameter");
    *out = value;
    return ncclSuccess;
}

ncclResult_t ncclParamGet(ncclParamHandle_t handle, void *out, int limit, int *length)
{
    ENTER();
    const char *value = value_of(handle);
    if (!value || !out || !length)
        return fail(ncclInvalidArgument, "ParamGet: not a parameter");
    *length = (int)strlen(value) + 1;
    if (*length > limit)
        return fail(ncclInvalidArgument, "ParamGet: the value is longer");
    memcpy(out, value, (size_t)*length);
    return ncclSuccess;
}

ncclResult_t ncclParamGetParameter(const char *key, const char **value, int *length)
{
    ENTER();
    ncclParamHandle_t handle;
    TRY(ncclParamBind(&handle, key));
    if (!value)
        return fail(ncclInvalidArgument, "ParamGet: no place for the value");
    *value = value_of(handle);
    if (length)
        *length = (int)strlen(*value);
    return ncclSuccess;
}

ncclResult_t ncclParamGetAllParameterKeys(const char ***table, int *length)
{
    ENTER();
    if (!table || !length)
        return fail(ncclInvalidArgument, "ParamGetAllParameterKeys: no place for the table");
    *table = parameters;
    *length = PARAMETERS;
    return ncclSuccess;
}

void ncclParamDumpAll(void)
{
    for (int i = 0; i < PARAMETERS; i++)
        printf("%s=%s\n", parameters[i], value_of((ncclParamHandle_t)parameters[i]));
}

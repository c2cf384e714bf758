"""The CUDA driver: the functions of cuda.h that pycomm calls, under the names it exports.

Where cuda.h maps a plain name to one with a version (``cuMemAlloc`` is ``cuMemAlloc_v2``), the
table has the latter: the plain symbol is the function of an ancient driver.
"""

from collections.abc import Mapping
from ctypes import byref, c_char_p
from typing import ClassVar

from pycomm.bindings._library import load_cuda_driver
from pycomm.bindings._table import Table
from pycomm.bindings.cuda_types import TYPES, CUresult
from pycomm.errors import CUDAError

__all__ = ["CUDA", "cuda"]

PROTOTYPES: Mapping[str, str] = {
    "2.0": """
        CUresult cuInit(unsigned int Flags);
        CUresult cuDeviceGetCount(int* count);
        CUresult cuDeviceGet(CUdevice* device, int ordinal);
        CUresult cuDeviceGetName(char* name, int len, CUdevice dev);
        CUresult cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev);
        CUresult cuCtxGetDevice(CUdevice* device);
        CUresult cuCtxSynchronize(void);
        CUresult cuMemFreeHost(void* p);
        CUresult cuModuleLoadData(CUmodule* module, const void* image);
        CUresult cuModuleUnload(CUmodule hmod);
        CUresult cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name);
        CUresult cuStreamCreate(CUstream* phStream, unsigned int Flags);
        CUresult cuStreamQuery(CUstream hStream);
        CUresult cuStreamSynchronize(CUstream hStream);
        CUresult cuEventCreate(CUevent* phEvent, unsigned int Flags);
        CUresult cuEventRecord(CUevent hEvent, CUstream hStream);
        CUresult cuEventQuery(CUevent hEvent);
        CUresult cuEventSynchronize(CUevent hEvent);
        CUresult cuEventElapsedTime(float* pMilliseconds, CUevent hStart, CUevent hEnd);
    """,
    "2.1": """
        CUresult cuModuleLoadDataEx(
            CUmodule* module, const void* image, unsigned int numOptions, CUjit_option* options,
            void** optionValues);
    """,
    "2.2": """
        CUresult cuDriverGetVersion(int* driverVersion);
        CUresult cuFuncGetAttribute(int* pi, CUfunction_attribute attrib, CUfunction hfunc);
        CUresult cuMemHostAlloc(void** pp, size_t bytesize, unsigned int Flags);
    """,
    "3.2": """
        CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice dev);
        CUresult cuMemAlloc_v2(CUdeviceptr* dptr, size_t bytesize);
        CUresult cuMemFree_v2(CUdeviceptr dptr);
        CUresult cuMemGetInfo_v2(size_t* free, size_t* total);
        CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* pdptr, void* p, unsigned int Flags);
        CUresult cuMemcpyHtoD_v2(CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount);
        CUresult cuMemcpyDtoH_v2(void* dstHost, CUdeviceptr srcDevice, size_t ByteCount);
        CUresult cuMemcpyHtoDAsync_v2(
            CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount, CUstream hStream);
        CUresult cuMemcpyDtoHAsync_v2(
            void* dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream);
        CUresult cuMemcpyDtoDAsync_v2(
            CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream);
        CUresult cuMemsetD8Async(
            CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream);
        CUresult cuMemsetD32Async(
            CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream);
        CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags);
    """,
    "4.0": """
        CUresult cuCtxGetCurrent(CUcontext* pctx);
        CUresult cuCtxSetCurrent(CUcontext ctx);
        CUresult cuCtxPushCurrent_v2(CUcontext ctx);
        CUresult cuCtxPopCurrent_v2(CUcontext* pctx);
        CUresult cuMemHostUnregister(void* p);
        CUresult cuMemcpyAsync(
            CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream);
        CUresult cuPointerGetAttribute(
            void* data, CUpointer_attribute attribute, CUdeviceptr ptr);
        CUresult cuStreamDestroy_v2(CUstream hStream);
        CUresult cuEventDestroy_v2(CUevent hEvent);
        CUresult cuLaunchKernel(
            CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
            unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
            unsigned int sharedMemBytes, CUstream hStream, void** kernelParams, void** extra);
    """,
    "4.1": """
        CUresult cuDeviceGetPCIBusId(char* pciBusId, int len, CUdevice dev);
    """,
    "5.5": """
        CUresult cuStreamCreateWithPriority(
            CUstream* phStream, unsigned int flags, int priority);
    """,
    "6.0": """
        CUresult cuGetErrorName(CUresult error, const char** pStr);
        CUresult cuGetErrorString(CUresult error, const char** pStr);
    """,
    "6.5": """
        CUresult cuMemHostRegister_v2(void* p, size_t bytesize, unsigned int Flags);
    """,
    "7.0": """
        CUresult cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev);
        CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active);
        CUresult cuPointerGetAttributes(
            unsigned int numAttributes, CUpointer_attribute* attributes, void** data,
            CUdeviceptr ptr);
    """,
    "9.2": """
        CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice dev);
        CUresult cuStreamGetCtx(CUstream hStream, CUcontext* pctx);
    """,
    "10.0": """
        CUresult cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void* userData);
        CUresult cuStreamEndCapture(CUstream hStream, CUgraph* phGraph);
        CUresult cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus* captureStatus);
        CUresult cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream);
        CUresult cuGraphExecDestroy(CUgraphExec hGraphExec);
        CUresult cuGraphDestroy(CUgraph hGraph);
    """,
    "10.1": """
        CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode);
        CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode);
    """,
    "11.0": """
        CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev);
    """,
    "11.2": """
        CUresult cuMemAllocAsync(CUdeviceptr* dptr, size_t bytesize, CUstream hStream);
        CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream);
    """,
    "11.4": """
        CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice dev);
        CUresult cuGraphInstantiateWithFlags(
            CUgraphExec* phGraphExec, CUgraph hGraph, unsigned long long flags);
    """,
    "12.8": """
        CUresult cuEventElapsedTime_v2(float* pMilliseconds, CUevent hStart, CUevent hEnd);
    """,
}


class CUDA(Table):
    """Functions of the CUDA driver, and the one place where its codes become exceptions."""

    provider: ClassVar[str] = "the driver of CUDA"

    def check(self, code: int, function: str) -> None:
        """Raise `CUDAError` unless `code`, which `function` returned, is success."""
        if code:
            raise self.error(code, function)

    def error(self, code: int, function: str) -> CUDAError:
        """Return the exception for a code that is not success."""
        name = self._words("cuGetErrorName", code) or _known(code)
        text = self._words("cuGetErrorString", code)
        error = CUDAError(f"{function} failed: {name} ({code})" + (f": {text}" if text else ""))
        error.code = code
        error.name = name
        error.function = function
        return error

    def _words(self, function: str, code: int) -> str:
        words = c_char_p()
        if not self.has(function) or getattr(self, function)(code, byref(words)):
            return ""
        return (words.value or b"").decode(errors="replace")


def _known(code: int) -> str:
    try:
        return CUresult(code).name
    except ValueError:
        return "code"


cuda = CUDA(PROTOTYPES, TYPES, load_cuda_driver)

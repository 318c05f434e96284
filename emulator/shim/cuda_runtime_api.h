#pragma once
#include "emu.h"
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 2 };
using cudaStream_t = void*;
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class K> cudaError_t cudaFuncSetAttribute(K, cudaFuncAttribute, int) { return cudaSuccess; }
struct cudaFuncAttributes {};
template <class K> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, K) { return cudaSuccess; }
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaGetDevice(int* d) { *d = 0; return cudaSuccess; }
extern int emu_sms;
inline cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr, int) { *v = emu_sms; return cudaSuccess; }
enum { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute { int id; struct { int programmaticStreamSerializationAllowed; } val; };
struct cudaLaunchConfig_t { dim3 gridDim, blockDim; size_t dynamicSmemBytes = 0; cudaStream_t stream = nullptr; cudaLaunchAttribute* attrs = nullptr; unsigned numAttrs = 0; };
template <class... P, class... A> cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(P...), A... args) {
  emu::run(c->gridDim, c->blockDim.x, c->dynamicSmemBytes, [&] { kernel(args...); });
  return cudaSuccess;
}
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
enum { cudaEnableDefault };
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** entry, unsigned, int, cudaDriverEntryPointQueryResult* found);
inline const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "ok" : "cuda error"; }

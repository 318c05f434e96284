// Encodes tensor maps through the driver's entry point, found at run time so that nothing links against libcuda.
//
// Contract: cudaErrorInvalidValue when the driver refuses a map (alignment, sizes) and for float32,
// cudaErrorNotSupported when the driver has no cuTensorMapEncodeTiled. Trade-off: L2 promotion of 256 B: a box row is
// 128 B and its neighbour is wanted by the next box of the same stage or step, so half the requests find their line.
#include "kernels/tensor_map.h"

namespace streammoe::sm90 {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

EncodeTiled find_encoder() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  // 12000: the version that introduced the function's present signature.
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeTiled>(entry);
}

cudaError_t encode(CUtensorMap* map, DType dtype, const void* data, cuuint32_t rank, const cuuint64_t* dims,
                   const cuuint64_t* strides, cuuint32_t box_columns = 64) {
  static const EncodeTiled encoder = find_encoder();
  if (encoder == nullptr) return cudaErrorNotSupported;
  if (dtype == DType::kF32) return cudaErrorInvalidValue;
  const auto type = dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint32_t box[3] = {box_columns, 64, 1};
  const auto swizzle = box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encoder(map, type, rank, const_cast<void*>(data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
              swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t encode_rows(CUtensorMap* map, DType dtype, const void* data, int64_t rows, int64_t columns) {
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
  return encode(map, dtype, data, 2, dims, strides);
}

cudaError_t encode_rows_narrow(CUtensorMap* map, DType dtype, const void* data, int64_t rows, int64_t columns) {
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
  return encode(map, dtype, data, 2, dims, strides, 32);
}

cudaError_t encode_experts(CUtensorMap* map, DType dtype, const void* data, int64_t experts, int64_t depth,
                           int64_t columns, int64_t expert_stride, int64_t row_stride) {
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(depth),
                              static_cast<cuuint64_t>(experts)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_stride) * 2, static_cast<cuuint64_t>(expert_stride) * 2};
  return encode(map, dtype, data, 3, dims, strides);
}

}  // namespace streammoe::sm90

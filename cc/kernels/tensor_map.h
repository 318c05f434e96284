// Host encoding of the TMA tensor maps of the grouped GEMMs: boxes of 64 x 64 elements of 16 bits with the 128-byte
// swizzle.
//
// Contract: maps are encoded per launch from the actual pointers and passed by value as __grid_constant__;
// experts are a dimension of their own, never flattened into rows, so that out-of-range boxes read zeros and
// not the next expert. Trade-off: about a microsecond of host time per map and launch; nothing cached,
// nothing to go stale.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "host/problem.h"

namespace streammoe::sm90 {

// [rows, columns] row-major, contiguous, bf16 or f16.
cudaError_t encode_rows(CUtensorMap* map, DType dtype, const void* data, int64_t rows, int64_t columns);
// The same with boxes of 64 rows x 32 columns and the 64-byte swizzle.
cudaError_t encode_rows_narrow(CUtensorMap* map, DType dtype, const void* data, int64_t rows, int64_t columns);
// [experts, depth, columns]: strides in elements, columns contiguous.
cudaError_t encode_experts(CUtensorMap* map, DType dtype, const void* data, int64_t experts, int64_t depth,
                           int64_t columns, int64_t expert_stride, int64_t row_stride);

}  // namespace streammoe::sm90

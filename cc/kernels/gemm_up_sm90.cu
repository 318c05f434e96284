// Launches the up products; the kernels are in gemm_up_sm90.cuh.
//
// Contract: cudaErrorInvalidValue for a type or an activation that has no kernel. Trade-off: all kernels are loaded
// when the device is prepared, also those of the type that a program does not use; loading one beside a waiting peer
// could stop both.
#include "kernels/gemm_launch.cuh"

namespace streammoe::sm90 {

cudaError_t prepare_gemm_up_sm90() {
  for (int32_t a = 0; a <= static_cast<int32_t>(Activation::kReLU2); ++a) {
    const Activation activation = static_cast<Activation>(a);
    for (const UpKind kind : {UpKind::kSorted, UpKind::kGather, UpKind::kKeep}) {
      if (cudaError_t e = prepare_gemm(gemm_up_kernel<DType::kBF16>(activation, kind)); e != cudaSuccess) return e;
      if (cudaError_t e = prepare_gemm(gemm_up_kernel<DType::kF16>(activation, kind)); e != cudaSuccess) return e;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_gemm_up_sm90(const GemmArgs& args, cudaStream_t stream, uint32_t* ctas) {
  if (args.scatter || args.dtype == DType::kF32) return cudaErrorInvalidValue;
  if (args.gate_up != nullptr && args.row_pair == nullptr) return cudaErrorInvalidValue;
  const UpKind kind = args.gate_up != nullptr    ? UpKind::kKeep
                      : args.row_pair != nullptr ? UpKind::kGather
                                                 : UpKind::kSorted;
  const GemmKernel kernel = args.dtype == DType::kF16 ? gemm_up_kernel<DType::kF16>(args.activation, kind)
                                                      : gemm_up_kernel<DType::kBF16>(args.activation, kind);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  return launch_gemm(kernel, is_gated(args.activation), args, stream, ctas);
}

}  // namespace streammoe::sm90

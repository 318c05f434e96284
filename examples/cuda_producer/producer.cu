// A CUDA kernel as the producer of a streamed layer: RMS norm, top-k, layout and publication of a chunk in one launch.
//
// Contract: two FFI handlers around one kernel. FusedProducer runs between open_stream and close_stream of a ring on
// one GPU, has the ring's `mem` as first operand and result in one memory, and publishes both halves of its chunk. A
// chunk without tokens is one CTA that writes nothing and publishes all the same, because the plan counts on it; a
// chunk of another size than the plan's is neither written nor published, so that the call ends at the ring's deadline
// with the ring's error. FusedProducerArrays writes the same rows and routes, bit for bit, to arrays for sm.moe.
// Routes: p = softmax(factor * logits) in float32; topk_ids are the K largest p, ties to the lower expert, as
// lax.top_k; topk_weights = p[topk_ids] (/ their sum), as sm.route_topk. A token from num_valid on takes no expert.
// Rows: with `scale` [H], factor = 1 / sqrt(mean(x^2) + epsilon) and row = x * factor * scale, so that logits must be
// x @ (scale * w_router). With `scale` of one element, factor = 1 and row = x.
// Trade-off: a warp per token, whose probabilities lie in registers: K passes over E / 32 of them, which is little up
// to 1,024 experts, and the norm reads its row twice, the second time from a cache.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "protocol/publish.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace sm = streammoe;

// sm.ring_attributes(ring) as one attribute.
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(sm::RingShape, StructMember<int64_t>("num_ranks"),
                                      StructMember<int64_t>("num_slots"), StructMember<int64_t>("chunk_tokens"),
                                      StructMember<int64_t>("hidden"), StructMember<int64_t>("top_k"),
                                      StructMember<int64_t>("itemsize"), StructMember<int64_t>("pool_tokens"),
                                      StructMember<int64_t>("num_experts"), StructMember<int64_t>("intermediate"));

namespace {

constexpr int kWarps = 8;  // per CTA: small CTAs find room beside the experts of the chunks before
constexpr int kThreads = 32 * kWarps;
constexpr int64_t kMaxCtas = 132 * 8;  // more than an H200 runs at once; larger chunks take rounds
constexpr int64_t kMaxExperts = 1024, kMaxTopK = 8;
constexpr uint32_t kWarp = 0xffffffffu;

struct Params {
  sm::RingView ring;  // mem is null: everything goes to the arrays
  int64_t chunk = 0;
  int64_t num_tokens = 0, row_words = 0;  // c, and 16-byte words of a row
  int32_t num_experts = 0, top_k = 0;
  const uint4* x = nullptr;            // [c, H]
  const float* logits = nullptr;       // [c, E]
  const uint4* scale = nullptr;        // [H], or null: no norm
  const int32_t* num_valid = nullptr;  // of the whole call
  uint4* rows = nullptr;               // [c, H], for arrays only; null without a norm
  int32_t* topk_ids = nullptr;         // [c, K]
  float* topk_weights = nullptr;       // [c, K]
  float epsilon = 0;
  bool normalize = true;  // weights of a token sum to one
  int32_t halves = 3;     // bit 0: publish the routing, bit 1: publish the rows
};

__device__ __forceinline__ float2 to_floats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ __forceinline__ float2 to_floats(__half2 pair) { return __half22float2(pair); }
__device__ __forceinline__ void round_to(__nv_bfloat162* out, float2 v) { *out = __float22bfloat162_rn(v); }
__device__ __forceinline__ void round_to(__half2* out, float2 v) { *out = __float22half2_rn(v); }

// The same bits in all lanes: each step adds the same two numbers in both lanes of a pair.
__device__ __forceinline__ float warp_sum(float value) {
  for (int step = 16; step > 0; step /= 2) value = __fadd_rn(value, __shfl_xor_sync(kWarp, value, step));
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kWarp, value, step));
  return value;
}

// 1 / sqrt(mean(x^2) + epsilon) of a row, by its warp.
template <class Pair>
__device__ __forceinline__ float inverse_rms(const uint4* x, int64_t words, float epsilon) {
  float sum = 0;
  for (int64_t i = threadIdx.x % 32; i < words; i += 32) {
    const uint4 word = x[i];
    const auto* pairs = reinterpret_cast<const Pair*>(&word);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 v = to_floats(pairs[n]);
      sum = __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, sum));
    }
  }
  const float mean = __fdiv_rn(warp_sum(sum), static_cast<float>(8 * words));
  return __frsqrt_rn(__fadd_rn(mean, epsilon));
}

// A row, or x * factor * scale rounded once.
template <class Pair>
__device__ __forceinline__ void write_row(const uint4* x, const uint4* scale, float factor, int64_t words, uint4* out) {
  constexpr int kVectors = 4;  // loads in flight per lane
  for (int64_t first = threadIdx.x % 32; first < words; first += 32 * kVectors) {
    uint4 data[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + 32 * v < words) data[v] = x[first + 32 * v];
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + 32 * v >= words) break;
      if (scale != nullptr) {
        const uint4 gains = scale[first + 32 * v];
        auto* pairs = reinterpret_cast<Pair*>(&data[v]);
        const auto* gain = reinterpret_cast<const Pair*>(&gains);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float2 value = to_floats(pairs[n]), by = to_floats(gain[n]);
          round_to(&pairs[n],
                   {__fmul_rn(__fmul_rn(value.x, factor), by.x), __fmul_rn(__fmul_rn(value.y, factor), by.y)});
        }
      }
      out[first + 32 * v] = data[v];
    }
  }
}

// Softmax and top-k of a token by its warp; lane k < K returns the k-th route. Lane l holds experts l, 32 + l, ...
struct Route {
  int32_t id;
  float weight;
};
template <int kPerLane>
__device__ __forceinline__ Route route(const Params& p, const float* logits, float factor) {
  const int lane = threadIdx.x % 32;
  float value[kPerLane];
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = 32 * i + lane;
    value[i] = expert < p.num_experts ? __fmul_rn(logits[expert], factor) : -INFINITY;
    largest = fmaxf(largest, value[i]);
  }
  largest = warp_max(largest);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const bool present = 32 * i + lane < p.num_experts;
    value[i] = present ? expf(__fsub_rn(value[i], largest)) : 0.f;  // NaN as in JAX: for one NaN or +inf, all are NaN
    sum = __fadd_rn(sum, value[i]);
  }
  sum = warp_sum(sum);
  // Probabilities are not negative, so their bits are ordered as they are. One more than the bits, NaN above all; 0 is
  // for experts that are taken, or do not exist.
  uint32_t key[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const float probability = __fdiv_rn(value[i], sum);
    const uint32_t bits = isnan(probability) ? 0x7fffffffu : __float_as_uint(probability);
    key[i] = 32 * i + lane < p.num_experts ? bits + 1 : 0;
  }
  Route mine = {-1, 0.f};
  float total = 0;
  for (int k = 0; k < p.top_k; ++k) {
    uint32_t best = 0, expert = ~0u;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (key[i] > best) best = key[i], expert = static_cast<uint32_t>(32 * i + lane);  // the lowest of equal ones
    }
    const uint32_t most = __reduce_max_sync(kWarp, best);
    const uint32_t taken = __reduce_min_sync(kWarp, best == most ? expert : ~0u);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (static_cast<uint32_t>(32 * i + lane) == taken) key[i] = 0;
    }
    const float probability = __uint_as_float(most - 1);
    total = __fadd_rn(total, probability);
    if (lane == k) mine = {static_cast<int32_t>(taken), probability};
  }
  if (p.normalize) mine.weight = __fdiv_rn(mine.weight, fmaxf(total, 1e-18f));
  return mine;
}

template <class Pair, int kPerLane>
__global__ void __launch_bounds__(kThreads) produce(const __grid_constant__ Params p) {
  const bool to_ring = p.ring.mem != nullptr;
  const sm::Slot to =
      to_ring ? sm::slot_of(p.ring, p.chunk) : sm::Slot{p.num_tokens, 0, p.rows, p.topk_ids, p.topk_weights};
  if (to.num_tokens != p.num_tokens) return;  // all CTAs: nothing arrives, nothing is published
  const int lane = threadIdx.x % 32;
  for (int64_t token = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32; token < p.num_tokens;
       token += gridDim.x * int64_t{kWarps}) {
    const uint4* x = p.x + token * p.row_words;
    const float factor = p.scale != nullptr ? inverse_rms<Pair>(x, p.row_words, p.epsilon) : 1.f;
    Route mine = route<kPerLane>(p, p.logits + token * p.num_experts, factor);
    if (to.first_token + token >= *p.num_valid) mine = {-1, 0.f};
    if (lane < p.top_k) {
      const int64_t pair = token * p.top_k + lane;
      to.topk_ids[pair] = mine.id, to.topk_weights[pair] = mine.weight;
      if (to_ring) p.topk_ids[pair] = mine.id, p.topk_weights[pair] = mine.weight;
    }
    if (to.x != nullptr)
      write_row<Pair>(x, p.scale, factor, p.row_words, static_cast<uint4*>(to.x) + token * p.row_words);
  }
  // One arrival stands for both halves: rows and routes of this CTA are written. Every thread takes part.
  if (to_ring && sm::last_to_arrive(p.ring, sm::Half::kLayout, gridDim.x)) {
    if ((p.halves & 1) != 0) sm::publish(p.ring, sm::Half::kRoute, p.chunk);
    if ((p.halves & 2) != 0) sm::publish(p.ring, sm::Half::kLayout, p.chunk);
  }
}

template <class Pair>
ffi::Error launch(const Params& p, cudaStream_t stream) {
  // At least one CTA: an empty chunk is published too.
  const auto grid = static_cast<uint32_t>(std::clamp<int64_t>((p.num_tokens + kWarps - 1) / kWarps, 1, kMaxCtas));
  if (p.num_experts <= 128) {
    produce<Pair, 4><<<grid, kThreads, 0, stream>>>(p);
  } else if (p.num_experts <= 256) {
    produce<Pair, 8><<<grid, kThreads, 0, stream>>>(p);
  } else {
    produce<Pair, 32><<<grid, kThreads, 0, stream>>>(p);
  }
  if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("fused_producer: ") + cudaGetErrorString(e));
  }
  return ffi::Error::Success();
}

ffi::Error launch(const Params& p, ffi::DataType dtype, cudaStream_t stream) {
  return dtype == ffi::DataType::BF16 ? launch<__nv_bfloat162>(p, stream) : launch<__half2>(p, stream);
}

ffi::Error refuse(const std::string& text) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "fused_producer: " + text);
}

// What both handlers are given, checked: x, logits, scale, num_valid, and the routes as results.
struct Operands {
  ffi::AnyBuffer x;
  ffi::BufferR2<ffi::F32> logits;
  ffi::AnyBuffer scale;
  ffi::BufferR0<ffi::S32> num_valid;
  ffi::Result<ffi::BufferR2<ffi::S32>> topk_ids;
  ffi::Result<ffi::BufferR2<ffi::F32>> topk_weights;

  ffi::Error read(Params* p) {
    const auto rows = x.dimensions(), scores = logits.dimensions(), ids = topk_ids->dimensions();
    const auto weights = topk_weights->dimensions();
    const ffi::DataType dtype = x.element_type();
    if (rows.size() != 2 || rows[1] < 8 || rows[1] % 8 != 0 ||
        (dtype != ffi::DataType::BF16 && dtype != ffi::DataType::F16)) {
      return refuse("x must be [c, H] of bfloat16 or float16, H a multiple of 8");
    }
    if (scores[0] != rows[0] || ids[0] != rows[0] || weights[0] != rows[0] || weights[1] != ids[1]) {
      return refuse("logits [c, E], ids and weights [c, K] must have the " + std::to_string(rows[0]) + " rows of x");
    }
    if (ids[1] < 1 || ids[1] > kMaxTopK || ids[1] > scores[1] || scores[1] > kMaxExperts) {
      return refuse("1 <= K <= 8, K <= E <= 1024 is needed, got K = " + std::to_string(ids[1]) +
                    ", E = " + std::to_string(scores[1]));
    }
    const auto gains = static_cast<int64_t>(scale.element_count());
    if (scale.element_type() != dtype || (gains != 1 && gains != rows[1])) {
      return refuse("scale must have H elements of x's dtype, or one, which is not used");
    }
    p->num_tokens = rows[0], p->row_words = rows[1] / 8;
    p->num_experts = static_cast<int32_t>(scores[1]), p->top_k = static_cast<int32_t>(ids[1]);
    p->x = static_cast<const uint4*>(x.untyped_data()), p->logits = logits.typed_data();
    p->scale = gains == 1 ? nullptr : static_cast<const uint4*>(scale.untyped_data());
    p->num_valid = num_valid.typed_data();
    p->topk_ids = topk_ids->typed_data(), p->topk_weights = topk_weights->typed_data();
    return ffi::Error::Success();
  }
};

ffi::Error produce_into_ring(cudaStream_t stream, sm::RingShape shape, int64_t chunk, float epsilon, int32_t normalize,
                             int32_t halves, ffi::Buffer<ffi::U8> mem, ffi::AnyBuffer x, ffi::BufferR2<ffi::F32> logits,
                             ffi::AnyBuffer scale, ffi::BufferR0<ffi::S32> num_valid,
                             ffi::Result<ffi::Buffer<ffi::U8>> mem_out, ffi::Result<ffi::BufferR2<ffi::S32>> topk_ids,
                             ffi::Result<ffi::BufferR2<ffi::F32>> topk_weights) {
  Params p;
  if (ffi::Error e = Operands{x, logits, scale, num_valid, topk_ids, topk_weights}.read(&p); e.failure()) return e;
  if (mem.typed_data() != mem_out->typed_data()) {
    return refuse("the ring must be returned in place: alias operand 0 to result 0, and donate the ring");
  }
  if (shape.num_ranks != 1 || !shape.on_gpu()) return refuse("the ring must be on one GPU");
  p.ring = sm::make_ring_view(mem.typed_data(), shape, /*rank=*/0);
  if (static_cast<int64_t>(mem.element_count()) != p.ring.at.total) {
    return refuse("mem must be the ring of that shape, " + std::to_string(p.ring.at.total) + " bytes, got " +
                  std::to_string(mem.element_count()));
  }
  if (shape.hidden != 8 * p.row_words || shape.itemsize != 2 || shape.top_k != p.top_k ||
      shape.num_experts != p.num_experts) {
    return refuse("the ring is for H = " + std::to_string(shape.hidden) + ", K = " + std::to_string(shape.top_k) +
                  ", E = " + std::to_string(shape.num_experts) +
                  ", the operands have H = " + std::to_string(8 * p.row_words) + ", K = " + std::to_string(p.top_k) +
                  ", E = " + std::to_string(p.num_experts));
  }
  p.chunk = chunk, p.epsilon = epsilon, p.normalize = normalize != 0, p.halves = halves;
  return launch(p, x.element_type(), stream);
}

ffi::Error produce_arrays(cudaStream_t stream, float epsilon, int32_t normalize, ffi::AnyBuffer x,
                          ffi::BufferR2<ffi::F32> logits, ffi::AnyBuffer scale, ffi::BufferR0<ffi::S32> num_valid,
                          ffi::Result<ffi::AnyBuffer> rows, ffi::Result<ffi::BufferR2<ffi::S32>> topk_ids,
                          ffi::Result<ffi::BufferR2<ffi::F32>> topk_weights) {
  Params p;
  if (ffi::Error e = Operands{x, logits, scale, num_valid, topk_ids, topk_weights}.read(&p); e.failure()) return e;
  if (p.scale != nullptr) {
    if (rows->element_type() != x.element_type() || rows->element_count() != x.element_count()) {
      return refuse("rows must be like x");
    }
    p.rows = static_cast<uint4*>(rows->untyped_data());
  }
  p.epsilon = epsilon, p.normalize = normalize != 0;
  return launch(p, x.element_type(), stream);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(FusedProducer, produce_into_ring,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Attr<sm::RingShape>("ring")
                                  .Attr<int64_t>("chunk")
                                  .Attr<float>("epsilon")
                                  .Attr<int32_t>("normalize")
                                  .Attr<int32_t>("halves")
                                  .Arg<ffi::Buffer<ffi::U8>>()       // mem [1, bytes]
                                  .Arg<ffi::AnyBuffer>()             // x [c, H]
                                  .Arg<ffi::BufferR2<ffi::F32>>()    // logits [c, E]
                                  .Arg<ffi::AnyBuffer>()             // scale [H] or [1]
                                  .Arg<ffi::BufferR0<ffi::S32>>()    // num_valid []
                                  .Ret<ffi::Buffer<ffi::U8>>()       // mem, in place
                                  .Ret<ffi::BufferR2<ffi::S32>>()    // topk_ids [c, K]
                                  .Ret<ffi::BufferR2<ffi::F32>>());  // topk_weights [c, K]

XLA_FFI_DEFINE_HANDLER_SYMBOL(FusedProducerArrays, produce_arrays,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Attr<float>("epsilon")
                                  .Attr<int32_t>("normalize")
                                  .Arg<ffi::AnyBuffer>()           // x [c, H]
                                  .Arg<ffi::BufferR2<ffi::F32>>()  // logits [c, E]
                                  .Arg<ffi::AnyBuffer>()           // scale [H] or [1]
                                  .Arg<ffi::BufferR0<ffi::S32>>()  // num_valid []
                                  .Ret<ffi::AnyBuffer>()  // rows [c, H], with scale [1] one element, not written
                                  .Ret<ffi::BufferR2<ffi::S32>>()   // topk_ids [c, K]
                                  .Ret<ffi::BufferR2<ffi::F32>>(),  // topk_weights [c, K]
                              {ffi::Traits::kCmdBufferCompatible});

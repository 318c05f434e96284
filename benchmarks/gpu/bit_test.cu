// Do the bits of one expert GEMM depend on how it is tiled? wgmma bf16, float32 accumulators, k ascending.
//
// One product D[128, 256] = A[128, K] B[K, 256] is computed with every instruction width N, with one and two
// warpgroups, with either operand stored K-major or MN-major, with the operands swapped (D^T = B^T A^T), with
// rows moved, with NaN in all other rows or columns, and from zeroed accumulators. All must give the bits of
// m64n256k16. Controls that are expected to differ show that the test can see a difference: split K,
// descending k, mma.sync m16n8k16. Prints one JSON record per case and data set: value = elements with other
// bits. Trade-off: the kernel is written to be readable and moves one k16 slab at a time; it is no benchmark.
//   bit_test [commit] [date] > records.jsonl
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "device/ptx_sm90.cuh"
#include "device/wgmma_sm90.cuh"

namespace sm90 = streammoe::sm90;

namespace {

constexpr int kRows = 128, kColumns = 256, kDepth = 2048;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "bit_test: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// A matrix element (i, k) lies at data[i * stride_i + k * stride_k].
struct View {
  const uint16_t* data;
  int64_t stride_i, stride_k;
};

// Order in which the k16 slabs enter the accumulator, and whether it starts as zero or with the first
// product.
enum class Order { kAscending, kDescending };

// Byte offset of (i, k) in a slab of `size` x 16 elements without swizzle, core matrices of 8 x 16 bytes.
// K-major: a core matrix is 8 i x 8 k; i groups 128 B apart (stride), k groups size * 16 B apart (leading).
// MN-major: a core matrix is 8 k x 8 i; k groups 128 B apart (leading), i groups 256 B apart (stride).
__device__ int slab_offset(int i, int k, int size, int mn_major) {
  if (!mn_major) return (i / 8) * 128 + (k / 8) * size * 16 + (i % 8) * 16 + (k % 8) * 2;
  return (i / 8) * 256 + (k / 8) * 128 + (k % 8) * 16 + (i % 8) * 2;
}

__device__ uint64_t slab_descriptor(uint32_t address, int size, int mn_major) {
  return mn_major ? sm90::smem_descriptor(address, 128, 256, 0) : sm90::smem_descriptor(address, size * 16, 128, 0);
}

// D[m, n] of kGroups * 64 rows and kN columns per CTA; k from k_begin to k_end.
template <int kN, int kTransA, int kTransB, int kGroups>
__global__ void __launch_bounds__(kGroups * 128)
    product(View a, View b, float* d, int64_t d_m, int64_t d_n, int k_begin, int k_end, Order order, bool zeroed) {
  __shared__ alignas(128) unsigned char slab_a[kGroups * 64 * 32];
  __shared__ alignas(128) unsigned char slab_b[kN * 32];
  const int m0 = blockIdx.x * 64 * kGroups, n0 = blockIdx.y * kN;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float acc[kN / 2];
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc[i] = zeroed ? 0.0f : 1e30f;
  const int slabs = (k_end - k_begin) / 16;
  for (int s = 0; s < slabs; ++s) {
    const int k0 = k_begin + 16 * (order == Order::kAscending ? s : slabs - 1 - s);
    for (int i = threadIdx.x; i < kGroups * 64 * 16; i += blockDim.x) {
      const int row = i / 16, k = i % 16;
      unsigned char* slab = slab_a + row / 64 * 2048;
      *reinterpret_cast<uint16_t*>(slab + slab_offset(row % 64, k, 64, kTransA)) =
          a.data[(m0 + row) * a.stride_i + (k0 + k) * a.stride_k];
    }
    for (int i = threadIdx.x; i < kN * 16; i += blockDim.x) {
      const int column = i / 16, k = i % 16;
      *reinterpret_cast<uint16_t*>(slab_b + slab_offset(column, k, kN, kTransB)) =
          b.data[(n0 + column) * b.stride_i + (k0 + k) * b.stride_k];
    }
    sm90::fence_async_shared();  // publishes the slabs to the tensor cores' reads behind the barrier
    __syncthreads();
    sm90::wgmma_fence();
    sm90::Wgmma<kN, kTransA, kTransB>::mma(acc, slab_descriptor(sm90::smem_address(slab_a) + group * 2048, 64, kTransA),
                                           slab_descriptor(sm90::smem_address(slab_b), kN, kTransB), zeroed || s > 0);
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    sm90::fence_accumulators(acc);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    const int m = m0 + group * 64 + warp * 16 + lane / 4 + (i % 4) / 2 * 8;
    const int n = n0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
    d[m * d_m + n * d_n] = acc[i];
  }
}

// The other instruction family, for comparison: mma.sync m16n8k16, one warp per 16 x 8 tile, k ascending.
__global__ void product_mma_sync(View a, View b, float* d, int64_t d_m, int64_t d_n) {
  const int m0 = blockIdx.x * 16, n0 = blockIdx.y * 8, lane = threadIdx.x;
  const int g = lane / 4, c = lane % 4 * 2;
  float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  auto pair = [](const View& v, int i, int k) {
    return v.data[i * v.stride_i + k * v.stride_k] |
           static_cast<uint32_t>(v.data[i * v.stride_i + (k + 1) * v.stride_k]) << 16;
  };
  for (int k = 0; k < kDepth; k += 16) {
    const uint32_t a0 = pair(a, m0 + g, k + c), a1 = pair(a, m0 + g + 8, k + c);
    const uint32_t a2 = pair(a, m0 + g, k + c + 8), a3 = pair(a, m0 + g + 8, k + c + 8);
    const uint32_t b0 = pair(b, n0 + g, k + c), b1 = pair(b, n0 + g, k + c + 8);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
  for (int i = 0; i < 4; ++i) d[(m0 + g + i / 2 * 8) * d_m + (n0 + c + i % 2) * d_n] = acc[i];
}

struct Matrices {
  std::vector<uint16_t> a, b;  // [kRows, kDepth], [kDepth, kColumns]
};

uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

Matrices make_data(const std::string& kind) {
  std::mt19937 engine(static_cast<uint32_t>(std::hash<std::string>{}(kind)));
  std::normal_distribution<float> normal;
  auto draw = [&](int span, int centre) {
    const int exponent = span == 0 ? 0 : static_cast<int>(engine() % (2 * span + 1)) - span;
    return to_bf16(std::ldexp(normal(engine), exponent + centre));
  };
  Matrices m;
  m.a.resize(kRows * kDepth);
  m.b.resize(kDepth * kColumns);
  // random: N(0, 1). wide: 40 binades each. denormal: bf16 subnormal A. tiny: products and sums in the
  // float32 subnormal range. huge: some sums overflow to infinity.
  const int span = kind == "wide" ? 20 : (kind == "huge" ? 6 : 0);
  const int centre_a = kind == "denormal" ? -129 : (kind == "tiny" ? -70 : (kind == "huge" ? 56 : 0));
  const int centre_b = kind == "tiny" ? -70 : (kind == "huge" ? 56 : 0);
  for (auto& v : m.a) v = draw(span, centre_a);
  for (auto& v : m.b) v = draw(span, centre_b);
  return m;
}

std::string g_commit = "unknown", g_date = "unknown", g_device, g_cuda;

void record(const std::string& name, int64_t value, int64_t count) {
  std::printf(
      "{\"name\": \"bits/%s\", \"value\": %lld, \"unit\": \"elements with other bits of %lld\", \"device\": "
      "\"%s\", "
      "\"versions\": {\"cuda\": \"%s\"}, \"commit\": \"%s\", \"date\": \"%s\"}\n",
      name.c_str(), static_cast<long long>(value), static_cast<long long>(count), g_device.c_str(), g_cuda.c_str(),
      g_commit.c_str(), g_date.c_str());
}

class Test {
 public:
  explicit Test(std::string kind) : kind_(std::move(kind)), host_(make_data(kind_)) {
    check(cudaMalloc(&a_, host_.a.size() * 2), "cudaMalloc");
    check(cudaMalloc(&b_, host_.b.size() * 2), "cudaMalloc");
    check(cudaMalloc(&d_, kRows * kColumns * 4), "cudaMalloc");
  }
  ~Test() {
    cudaFree(a_);
    cudaFree(b_);
    cudaFree(d_);
  }

  void run();

 private:
  using Launch = std::function<void(View, View, float*)>;

  std::vector<float> output(const Matrices& m, const Launch& launch) {
    check(cudaMemcpy(a_, m.a.data(), m.a.size() * 2, cudaMemcpyHostToDevice), "copy");
    check(cudaMemcpy(b_, m.b.data(), m.b.size() * 2, cudaMemcpyHostToDevice), "copy");
    check(cudaMemset(d_, 0xff, kRows * kColumns * 4), "poison");
    launch(View{a_, kDepth, 1}, View{b_, 1, kColumns}, d_);
    check(cudaDeviceSynchronize(), "kernel");
    std::vector<float> d(kRows * kColumns);
    check(cudaMemcpy(d.data(), d_, d.size() * 4, cudaMemcpyDeviceToHost), "copy back");
    return d;
  }

  template <int kN, int kTransA, int kTransB, int kGroups>
  static Launch plain(bool zeroed = false) {
    return [zeroed](View a, View b, float* d) {
      product<kN, kTransA, kTransB, kGroups><<<dim3(kRows / 64 / kGroups, kColumns / kN), kGroups * 128>>>(
          a, b, d, kColumns, 1, 0, kDepth, Order::kAscending, zeroed);
    };
  }
  // D^T = B^T A^T: 64 columns of D are the instruction's rows, kN rows of D its columns.
  template <int kN, int kTransA, int kTransB>
  static Launch swapped() {
    return [](View a, View b, float* d) {
      product<kN, kTransA, kTransB, 1>
          <<<dim3(kColumns / 64, kRows / kN), 128>>>(b, a, d, 1, kColumns, 0, kDepth, Order::kAscending, false);
    };
  }

  // Elements whose bits differ, where keep(row, column); two NaN count as equal.
  void compare(
      const std::string& name, const std::vector<float>& d,
      const std::function<bool(int, int)>& keep = [](int, int) { return true; }) {
    int64_t different = 0, count = 0;
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kColumns; ++j) {
        if (!keep(i, j)) continue;
        ++count;
        const float x = d[i * kColumns + j], y = base_[i * kColumns + j];
        if (std::memcmp(&x, &y, 4) != 0 && !(std::isnan(x) && std::isnan(y))) ++different;
      }
    }
    record(name + "/" + kind_, different, count);
  }

  void reference();
  void moved_rows();
  void poisoned();
  void controls();

  std::string kind_;
  Matrices host_;
  std::vector<float> base_;
  uint16_t* a_ = nullptr;
  uint16_t* b_ = nullptr;
  float* d_ = nullptr;
};

// The base against float64: the layouts are right and the values are a product at all.
void Test::reference() {
  double error = 0, norm = 0;
  int64_t zeros = 0, special = 0;
  for (int i = 0; i < kRows; i += 7) {
    for (int j = 0; j < kColumns; j += 5) {
      double sum = 0;
      for (int k = 0; k < kDepth; ++k) {
        sum += static_cast<double>(from_bf16(host_.a[i * kDepth + k])) * from_bf16(host_.b[k * kColumns + j]);
      }
      const double value = base_[i * kColumns + j];
      zeros += value == 0;
      if (!std::isfinite(value)) {
        ++special;
        continue;
      }
      error += (value - sum) * (value - sum);
      norm += sum * sum;
    }
  }
  std::fprintf(stderr, "%-9s relative error against float64 %.3e, zeros %lld, not finite %lld\n", kind_.c_str(),
               std::sqrt(error / norm), static_cast<long long>(zeros), static_cast<long long>(special));
}

void Test::moved_rows() {
  for (int shift : {1, 8, 63, 64, 77}) {
    Matrices m = host_;
    for (int i = 0; i < kRows; ++i) {
      std::memcpy(&m.a[(i + shift) % kRows * kDepth], &host_.a[i * kDepth], kDepth * 2);
    }
    const std::vector<float> d = output(m, plain<256, 0, 1, 2>());
    std::vector<float> back(d.size());
    for (int i = 0; i < kRows; ++i) {
      std::memcpy(&back[i * kColumns], &d[(i + shift) % kRows * kColumns], kColumns * 4);
    }
    compare("row_shift_" + std::to_string(shift), back);
  }
}

void Test::poisoned() {
  const uint16_t nan = 0x7fc0;
  for (int parity = 0; parity < 2; ++parity) {
    Matrices m = host_;
    for (int i = 0; i < kRows; ++i) {
      if (i % 2 != parity) std::fill_n(m.a.begin() + i * kDepth, kDepth, nan);
    }
    auto kept_row = [parity](int i, int) { return i % 2 == parity; };
    compare("nan_rows_" + std::to_string(parity), output(m, plain<256, 0, 1, 2>()), kept_row);
    compare("nan_rows_swapped_" + std::to_string(parity), output(m, swapped<64, 1, 0>()), kept_row);
    m = host_;
    for (int k = 0; k < kDepth; ++k) {
      for (int j = 0; j < kColumns; ++j) {
        if (j % 2 != parity) m.b[k * kColumns + j] = nan;
      }
    }
    compare("nan_columns_" + std::to_string(parity), output(m, plain<256, 0, 1, 2>()),
            [parity](int, int j) { return j % 2 == parity; });
  }
  // One row alone, every other row NaN: the decode shape.
  Matrices m = host_;
  for (int i = 0; i < kRows; ++i) {
    if (i != 5) std::fill_n(m.a.begin() + i * kDepth, kDepth, nan);
  }
  compare("nan_all_but_one", output(m, plain<256, 0, 1, 2>()), [](int i, int) { return i == 5; });
}

void Test::controls() {
  auto half = [](int begin, int end) {
    return [begin, end](View a, View b, float* d) {
      product<256, 0, 1, 2><<<1, 256>>>(a, b, d, kColumns, 1, begin, end, Order::kAscending, false);
    };
  };
  std::vector<float> first = output(host_, half(0, kDepth / 2));
  const std::vector<float> second = output(host_, half(kDepth / 2, kDepth));
  for (size_t i = 0; i < first.size(); ++i) first[i] += second[i];
  compare("control_split_k", first);
  compare("control_k_descending", output(host_, [](View a, View b, float* d) {
            product<256, 0, 1, 2><<<1, 256>>>(a, b, d, kColumns, 1, 0, kDepth, Order::kDescending, false);
          }));
  compare("control_mma_sync_m16n8k16", output(host_, [](View a, View b, float* d) {
            product_mma_sync<<<dim3(kRows / 16, kColumns / 8), 32>>>(a, b, d, kColumns, 1);
          }));
}

void Test::run() {
  base_ = output(host_, plain<256, 0, 1, 2>());
  reference();
  compare("again", output(host_, plain<256, 0, 1, 2>()));
  compare("n8", output(host_, plain<8, 0, 1, 1>()));
  compare("n16", output(host_, plain<16, 0, 1, 1>()));
  compare("n32", output(host_, plain<32, 0, 1, 1>()));
  compare("n64", output(host_, plain<64, 0, 1, 1>()));
  compare("n128", output(host_, plain<128, 0, 1, 1>()));
  compare("n256", output(host_, plain<256, 0, 1, 1>()));
  compare("n64_rows128", output(host_, plain<64, 0, 1, 2>()));
  compare("n128_rows128", output(host_, plain<128, 0, 1, 2>()));
  compare("b_k_major", output(host_, plain<256, 0, 0, 2>()));
  compare("a_mn_major", output(host_, plain<256, 1, 1, 2>()));
  compare("a_mn_b_k_major", output(host_, plain<256, 1, 0, 2>()));
  compare("zeroed_accumulator", output(host_, plain<256, 0, 1, 2>(true)));
  compare("swapped_n8", output(host_, swapped<8, 1, 0>()));
  compare("swapped_n16", output(host_, swapped<16, 1, 0>()));
  compare("swapped_n32", output(host_, swapped<32, 1, 0>()));
  compare("swapped_n64", output(host_, swapped<64, 1, 0>()));
  compare("swapped_n128", output(host_, swapped<128, 1, 0>()));
  compare("swapped_n64_k_major", output(host_, swapped<64, 0, 0>()));
  moved_rows();
  poisoned();
  controls();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) g_commit = argv[1];
  if (argc > 2) g_date = argv[2];
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "device");
  g_device = properties.name;
  int runtime = 0;
  check(cudaRuntimeGetVersion(&runtime), "version");
  g_cuda = std::to_string(runtime / 1000) + "." + std::to_string(runtime % 1000 / 10);
  for (const char* kind : {"random", "wide", "denormal", "tiny", "huge"}) Test(kind).run();
  return 0;
}

#!/bin/sh
# Builds the harness library (and, with `bits`, the bit test) into build_gpu/: build.sh [debug|release] [bits]
# debug gives every wait on a barrier a deadline of about one second. Run at the root of the repository.
set -eu
mode=${1:-release}
flags="-gencode=arch=compute_90a,code=sm_90a -std=c++20 -O3 -Icc -Xcompiler -fPIC,-Wall -cudart static"
[ "$mode" = debug ] && flags="$flags -DSTREAMMOE_WAIT_DEADLINE=2000000000ll" || flags="$flags -DNDEBUG"
mkdir -p build_gpu
nvcc $flags -shared cc/kernels/*.cu cc/host/call.cc benchmarks/gpu/capi.cu benchmarks/gpu/capi_backward.cu -o "build_gpu/libkernels_$mode.so"
[ "${2:-}" = bits ] && nvcc $flags benchmarks/gpu/bit_test.cu -o build_gpu/bit_test || true

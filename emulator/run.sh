#!/bin/bash
# Runs the CUDA kernels of the layer on the CPU: run.sh build | sweep | mutate | library   (see NOTES.md)
#
# A CUDA thread is a fiber; mbarriers, TMA with its swizzles, wgmma descriptors, clusters and warp operations are
# emulated from what the instructions promise, asynchronous ones at random times. OUT: where to build, default
# /tmp/streammoe_emulator.
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
out=${OUT:-/tmp/streammoe_emulator}
mkdir -p "$out"
units="tensor_map plan gather_rows forward_sm90 backward_sm90 backward_rows combine_sm90 gemm_dx_sm90 gemm_dw_sm90
gemm_dact_sm90 gemm_dact_bf16_sm90 gemm_dact_f16_sm90 gemm_down_sm90 gemm_up_sm90 gemm_up_bf16_sm90 gemm_up_f16_sm90"
flags="-std=c++20 -O2 -fPIC -ffp-contract=off -fno-strict-aliasing -w -Wno-psabi"

sources() { # a copy with shared-memory declarations rewritten and the activations without asm
  rm -rf "$out/src" && mkdir -p "$out/src" && cp -r "$root"/cc/{kernels,host,protocol,device} "$out/src/"
  sed -i -E 's/extern __shared__ ([a-z0-9_]+) ([a-z_]+)\[\];/\1* const \2 = static_cast<\1*>(emu::shared_base());/' \
    "$out"/src/kernels/*.cu "$out"/src/kernels/*.cuh
  rm "$out"/src/device/{ptx_sm90,wgmma_sm90,element}.cuh
  OUT="$out" python3 - <<'P'
import os
path = os.environ["OUT"] + "/src/device/activation.cuh"
s = open(path).read()
def body(name, new):
    global s
    i = s.index(name); j = s.index("{", i); k = s.index("\n}\n", j)
    s = s[:j] + "{" + new + s[k:]
body("min_nan(float a", "return (a != a || b != b) ? NAN : (a < b ? a : b);")
body("max_nan(float a", "return (a != a || b != b) ? NAN : (a > b ? a : b);")
body("logistic_base2(float t", "float e = exp2f(t); return 1.0f / (1.0f + e);")
open(path, "w").write(s.replace("#pragma once", '#pragma once\n#include "emu.h"'))
P
}
compile() { # unit, folder
  nice g++ $flags -x c++ -I"$here/shim" -I"$out/src" -c "$out/src/kernels/$1.cu" -o "$2/$1.o"
}
program() { # folder of objects, program
  g++ $flags -I"$here/shim" -I"$out/src" "$here/test.cc" "$1"/*.o -o "$2"
}
build() {
  sources && mkdir -p "$out/o" && rm -f "$out"/o/*
  for u in $units; do compile "$u" "$out/o" || exit 1; done
  g++ $flags -I"$here/shim" -I"$out/src" -c "$here/emu.cc" -o "$out/o/emu.o" && program "$out/o" "$out/test"
}
library() { # for dry_run.py: the harness's C functions over the emulated kernels
  build && mkdir -p "$out/l" && cp "$out"/o/*.o "$out/l/"
  for f in capi capi_backward; do
    g++ $flags -x c++ -I"$here/shim" -I"$out/src" -c "$root/benchmarks/gpu/$f.cu" -o "$out/l/$f.o" || exit 1
  done
  g++ -shared "$out"/l/*.o -o "$out/kernels.so" && echo "$out/kernels.so"
}
case_() { nice "$out/test" "$@" > "$out/log" 2>&1 && tail -1 "$out/log" | sed "s|^|$* |" || { echo "FAILED: $*"; tail -14 "$out/log"; }; }
sweep() { # T K H I E activation f16 biased packed capacity limit seed [one|none|empty]
  case_ 150 2 136 72 3 0 0 1 1 -1 inf 2
  case_ 150 2 136 72 3 0 1 1 0 -1 0.7 3
  case_ 150 2 136 72 3 1 0 1 1 -1 7 4
  case_ 150 2 136 72 3 2 0 1 0 -1 inf 5
  case_ 150 2 136 72 3 3 0 1 1 -1 inf 6
  case_ 150 2 136 72 3 4 1 1 1 -1 inf 7
  case_ 150 2 136 72 3 5 0 1 1 -1 inf 8
  case_ 300 2 320 200 2 0 0 0 1 -1 inf 9
  case_ 90 3 72 296 4 0 0 1 1 -1 inf 11
  case_ 90 3 648 40 4 0 0 1 0 -1 inf 12
  case_ 260 2 136 136 3 0 0 1 1 60 inf 13
  case_ 260 2 136 136 2 0 0 1 1 -1 inf 14 one
  case_ 40 2 136 136 4 0 0 1 1 -1 inf 15 none
  case_ 140 2 136 136 4 0 0 1 1 -1 inf 16 empty
  case_ 0 2 136 72 3 0 0 1 1 -1 inf 2
  case_ 5 3 8 8 2 0 0 1 0 -1 inf 18
  for s in 1 2 3 4; do SCHED=$s SMS=$((2 + 2 * (s % 3))) case_ 300 2 320 200 2 0 0 0 1 -1 inf 9; done
}
mutant() { # file, sed expression, units, case: each must fail
  sources && sed -i -E "$2" "$out/src/$1" && mkdir -p "$out/m" && cp "$out"/o/*.o "$out/m/"
  for u in $3; do compile "$u" "$out/m" || return; done
  program "$out/m" "$out/mutant"
  for s in 1 2 3; do
    SCHED=$s timeout 120 "$out/mutant" $4 > "$out/log" 2>&1 || { echo "caught: $2 | $(grep -E 'WRONG|EMU|not \+0|wrote' "$out/log" | head -1)"; return; }
  done
  echo "MISSED: $2"
}
mutate() {
  local a="150 2 136 72 3 0 0 1 1 -1 inf 2" all="gemm_dact_bf16_sm90 gemm_dx_sm90 gemm_dw_sm90"
  mutant kernels/backward_core_sm90.cuh 's/wgmma_wait<1>\(\);.*/wgmma_wait<2>();/' "$all" "$a"
  mutant kernels/backward_core_sm90.cuh 's/wgmma_wait<0>\(\);//' "$all" "$a"
  mutant kernels/backward_core_sm90.cuh 's/f.empty \+ 8 \* s, 16\)/f.empty + 8 * s, 8)/' "$all" "$a"
  mutant kernels/backward_core_sm90.cuh 's/\(kTrans \? 2048 : 32\)/(kTrans ? 1024 : 32)/' "$all" "$a"
  mutant kernels/gemm_dact_sm90.cuh 's/\(row >> 1\) \& 3/row \& 3/' gemm_dact_bf16_sm90 "$a"
  mutant kernels/backward_rows.cu 's/p.x\[i\] = p.dy\[i\] =/p.dy[i] =/' backward_rows "$a"
  mutant kernels/gemm_dw_sm90.cu 's/kGated \? box >> 1 : 0/0/' gemm_dw_sm90 "$a"
  SMS=2 mutant kernels/gemm_dact_sm90.cuh 's/drain\(pipe, 2 \*/drain(pipe, /' gemm_dact_bf16_sm90 "40 2 136 72 3 0 0 1 1 -1 inf 2"
  mutant kernels/gemm_dw_sm90.cu 's/\(2 \* tile.row_pair \+ rank\)/(2 * tile.row_pair)/' gemm_dw_sm90 "$a"
  mutant kernels/gemm_dw_sm90.cu 's/which \* kEights \+ i/i/' gemm_dw_sm90 "$a"
  mutant kernels/gemm_dw_sm90.cu 's/\+ 8 \* out.row_stride/+ 4 * out.row_stride/' gemm_dw_sm90 "$a"
  sources
}
"${1:-build}"

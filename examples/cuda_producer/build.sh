#!/bin/sh
# Builds the producer with nvcc alone: build.sh LIBRARY STREAMMOE_INCLUDE FFI_INCLUDE, the folders being what
# jax_streammoe.include_dir() and jax.ffi.include_dir() return. CXX names the host compiler if it is not nvcc's own. A
# library that is there is replaced, not overwritten: a process may have it loaded.
set -eu
here=$(dirname "$0")
nvcc ${CXX:+-ccbin "$CXX"} -gencode=arch=compute_90a,code=sm_90a -std=c++20 -O3 -DNDEBUG -Xcompiler -fPIC,-Wall \
  -cudart static -shared -I "$2" -isystem "$3" "$here/producer.cu" -o "$1.new"
mv "$1.new" "$1"

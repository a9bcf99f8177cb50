// SPDX-License-Identifier: Apache-2.0
// A C entry to FlashInfer's cluster top-k, for comparison in benchmarks/topk.py. Needs a FlashInfer checkout and tvm-ffi:
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a --shared -Xcompiler -fPIC \
//     -I flashinfer/include -I $(python -c "import tvm_ffi; print(tvm_ffi.libinfo.find_include_path())") \
//     benchmarks/flashinfer_topk.cu -o libflashinfer_topk.so
#include <cuda_bf16.h>

#include <flashinfer/fast_topk_clusters_exact.cuh>

extern "C" int flashinfer_topk(void* logits, void* indices, int columns, void* overflow, int rows, int row_stride,
                               int k, int num_cached, int num_clusters, void* stream) {
  flashinfer::sampling::launch_fast_topk_clusters_exact<__nv_bfloat16, int>(
      static_cast<const __nv_bfloat16*>(logits), static_cast<int*>(indices), nullptr, columns, nullptr,
      static_cast<int*>(overflow), columns / num_clusters, rows, row_stride, k, num_cached, num_clusters, true, k,
      static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

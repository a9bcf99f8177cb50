// SPDX-License-Identifier: Apache-2.0
// A C entry to vLLM's custom all-reduce, for comparison by `nvcomm bench all_reduce --vllm-library`. Needs vLLM's sources:
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a --shared -Xcompiler -fPIC -I vllm/csrc \
//     benchmarks/vllm_all_reduce.cu -o libvllm_all_reduce.so
// Memory comes from the caller, shared in whatever way; which kernel runs at which size is as in vLLM, on NVLink.
#include <custom_all_reduce.cuh>

#include <algorithm>

namespace {

struct AllReduce {
  vllm::RankSignals signals;
  vllm::RankData* inputs;
  int rank;
  int world_size;
};

template <int kRanks>
void launch(const AllReduce& all_reduce, nv_bfloat16* out, int count, cudaStream_t stream) {
  constexpr int kThreads = 512;
  const int packs = count / 8;
  const int blocks = std::min(vllm::defaultBlockLimit, (packs + kThreads - 1) / kThreads);
  vllm::Signal* self = all_reduce.signals.signals[all_reduce.rank];
  const size_t bytes = size_t(packs) * 16;
  if (kRanks == 2 || bytes < (kRanks <= 4 ? 512 : 256) * 1024) {
    vllm::cross_device_reduce_1stage<nv_bfloat16, kRanks>
        <<<blocks, kThreads, 0, stream>>>(all_reduce.inputs, all_reduce.signals, self, out, all_reduce.rank, packs);
  } else {
    vllm::cross_device_reduce_2stage<nv_bfloat16, kRanks>
        <<<blocks, kThreads, 0, stream>>>(all_reduce.inputs, all_reduce.signals, self, out, all_reduce.rank, packs);
  }
}

}  // namespace

extern "C" {

// Bytes that lie before the intermediate results in each rank's signal memory, which begins zeroed.
int vllm_signal_bytes() { return sizeof(vllm::Signal); }

// Every rank's signal memory and input, as this process sees them; `rank_data` is 128 bytes of this GPU. Lives for ever.
void* vllm_create(void** signals, void** inputs, void* rank_data, int rank, int world_size) {
  auto* made = new AllReduce{};
  vllm::RankData data{};
  for (int i = 0; i < world_size; i++) {
    made->signals.signals[i] = static_cast<vllm::Signal*>(signals[i]);
    data.ptrs[i] = inputs[i];
  }
  made->inputs = static_cast<vllm::RankData*>(rank_data);
  made->rank = rank;
  made->world_size = world_size;
  return cudaMemcpy(rank_data, &data, sizeof data, cudaMemcpyHostToDevice) == cudaSuccess ? made : nullptr;
}

// Sums the first `count` bf16 of all inputs into `out`; `count` is a multiple of 8. Returns a CUDA error.
int vllm_all_reduce(void* handle, void* out, int count, void* stream) {
  const auto& all_reduce = *static_cast<AllReduce*>(handle);
  auto* result = static_cast<nv_bfloat16*>(out);
  switch (all_reduce.world_size) {
    case 2: launch<2>(all_reduce, result, count, static_cast<cudaStream_t>(stream)); break;
    case 4: launch<4>(all_reduce, result, count, static_cast<cudaStream_t>(stream)); break;
    case 8: launch<8>(all_reduce, result, count, static_cast<cudaStream_t>(stream)); break;
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}
}

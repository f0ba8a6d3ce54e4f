#include "kernels/cuda_launch.cuh"
#include "kernels/non_finite_octet.h"

namespace ballast::kernels {
namespace {

__device__ std::uint64_t lower(std::uint64_t a, std::uint64_t b) { return a < b ? a : b; }

__device__ std::uint64_t lowest_of_warp(std::uint64_t x) {
  for (unsigned distance = 16; distance > 0; distance /= 2) {
    x = lower(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

__global__ void __launch_bounds__(threads_per_chunk)
    search_kernel(ConstNumbers values, Stretch all, std::uint64_t first_index, std::uint64_t* first) {
  const std::uint32_t infinity = infinity_of(values.dtype);
  std::uint64_t found = UINT64_MAX;
  each_chunk(all.chunks_end, [&](std::size_t chunk) {
    const OctetPlace place = place_in(all, chunk, threadIdx.x);
    found = lower(found, first_non_finite_of(load_octet(values, place), infinity, first_index + place.first));
  });
  found = lowest_of_warp(found);
  if (threadIdx.x % 32 == 0 && found != UINT64_MAX) {
    atomicMin(reinterpret_cast<unsigned long long*>(first), static_cast<unsigned long long>(found));
  }
}

}  // namespace

void first_non_finite(const Cuda& cuda, const ConstNumbers& values, std::uint64_t first_index, std::uint64_t* first) {
  const Stretch all = whole_array(values.count, is_octet_aligned(values));
  launch<search_kernel>(cuda, "launching a search for NaN and infinity", all.chunks_end, values, all, first_index,
                        first);
}

}  // namespace ballast::kernels

#include "kernels/cuda_launch.cuh"
#include "kernels/number_octet.h"

namespace ballast::kernels {
namespace {

__global__ void __launch_bounds__(threads_per_chunk) fill_kernel(Numbers to, Stretch all, std::uint32_t pattern) {
  Octet octet;
  for (std::uint32_t& element : octet.at) {
    element = pattern;
  }
  each_chunk(all.chunks_end, [&](std::size_t chunk) { store_octet(to, place_in(all, chunk, threadIdx.x), octet); });
}

std::uint32_t pattern_of(float value, DType dtype) {
  if (dtype == DType::u8) {
    return static_cast<std::uint32_t>(value);
  }
  return with_format(dtype, [value](auto format) { return decltype(format)::encode(value); });
}

}  // namespace

void fill(const Cuda& cuda, const Numbers& to, float value) {
  const Stretch all = whole_array(to.count, is_octet_aligned(to));
  launch(cuda, "launching a fill", all.chunks_end, fill_kernel, to, all, pattern_of(value, to.dtype));
}

}  // namespace ballast::kernels

#include "kernels/cuda_launch.cuh"
#include "kernels/number_octet.h"

namespace ballast::kernels {
namespace {

__global__ void __launch_bounds__(threads_per_chunk) fill_kernel(Numbers to, Stretch all, Octet octet) {
  each_chunk(all.chunks_end, [&](std::size_t chunk) { store_octet(to, place_in(all, chunk, threadIdx.x), octet); });
}

}  // namespace

void fill(const Cuda& cuda, const Numbers& to, float value) {
  const Stretch all = whole_array(to.count, is_octet_aligned(to));
  launch<fill_kernel>(cuda, "launching a fill", all.chunks_end, to, all, fill_octet(value, to.dtype));
}

}  // namespace ballast::kernels

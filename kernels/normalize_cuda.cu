#include "kernels/cuda_launch.cuh"
#include "kernels/number_octet.h"

namespace ballast::kernels {
namespace {

__global__ void __launch_bounds__(threads_per_chunk)
    normalize_kernel(ConstNumbers from, Stretch all, const ExactSum* squares, NormBound bound, Numbers to) {
  __shared__ float by;
  if (threadIdx.x == 0) {
    by = divisor(*squares, bound);
  }
  __syncthreads();
  each_chunk(all.chunks_end, [&](std::size_t chunk) {
    const OctetPlace place = place_in(all, chunk, threadIdx.x);
    FloatOctet floats = load_floats(from, place);
    for (float& x : floats.at) {
      x = x / by;
    }
    store_floats(to, place, floats);
  });
}

}  // namespace

void normalize(const Cuda& cuda, const ConstNumbers& from, const ExactSum* squares, const NormBound& bound,
               const Numbers& to) {
  const Stretch all = whole_array(from.count, is_octet_aligned(from) && is_octet_aligned(to));
  launch<normalize_kernel>(cuda, "launching a division by a norm", all.chunks_end, from, all, squares, bound, to);
}

}  // namespace ballast::kernels

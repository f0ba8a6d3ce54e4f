#include "kernels/accumulate_math.h"
#include "kernels/cuda_launch.cuh"
#include "kernels/number_octet.h"

namespace ballast::kernels {
namespace {

__global__ void __launch_bounds__(threads_per_chunk)
    accumulate_kernel(ConstNumbers from, float scale, Numbers into, Stretch all) {
  each_chunk(all.chunks_end, [&](std::size_t chunk) {
    const OctetPlace place = place_in(all, chunk, threadIdx.x);
    const FloatOctet added = load_floats(from, place);
    FloatOctet sum = load_floats({into.data, into.count, into.dtype}, place);
    for (std::size_t i = 0; i < octet_size; ++i) {
      sum.at[i] = accumulated(sum.at[i], added.at[i], scale);
    }
    store_floats(into, place, sum);
  });
}

}  // namespace

void accumulate(const Cuda& cuda, const ConstNumbers& from, float scale, const Numbers& into) {
  const Stretch all = whole_array(into.count, is_octet_aligned(from) && is_octet_aligned(into));
  launch(cuda, "launching an accumulation", all.chunks_end, accumulate_kernel, from, scale, into, all);
}

}  // namespace ballast::kernels

#include "kernels/cuda_launch.cuh"
#include "kernels/number_octet.h"
#include "kernels/squares_octet.h"

namespace ballast::kernels {
namespace {

constexpr unsigned groups_per_chunk = threads_per_chunk / threads_per_group;
constexpr unsigned group_stride = group_size + square_lanes;  // a warp's two groups then lie in different banks

// The first eight of a group's threads add up its squares, in the order of sum_of_squares_walk.h.
__device__ double squares_of_group(const float* group) {
  const std::uint32_t threads = 0xffu << (threadIdx.x & 16u);
  double sum = squares_of_lane(group, threadIdx.x % threads_per_group);
  for (unsigned distance = square_lanes / 2; distance > 0; distance /= 2) {
    sum = sum + __shfl_xor_sync(threads, sum, distance);
  }
  return sum;
}

// Each group of threads has its own exact sum, to which its first thread adds. At the end all these sums are added to
// the result as integers, so their order does not matter.
__global__ void __launch_bounds__(threads_per_chunk) sum_kernel(ConstNumbers values, Stretch all, ExactSum* into) {
  alignas(16) __shared__ float numbers[groups_per_chunk * group_stride];
  __shared__ std::int64_t words[groups_per_chunk][exact_sum_words];
  const unsigned group = threadIdx.x / threads_per_group;
  const unsigned lane = threadIdx.x % threads_per_group;
  float* const mine = numbers + group * group_stride;
  auto& sum = *reinterpret_cast<ExactSum*>(words[group]);
  if (lane == 0) {
    sum = {};
  }
  each_chunk(all.chunks_end, [&](std::size_t chunk) {
    const FloatOctet floats = load_floats(values, place_in(all, chunk, threadIdx.x));
    for (std::size_t i = 0; i < octet_size; ++i) {
      mine[lane * octet_size + i] = floats.at[i];
    }
    __syncwarp();
    if (lane < square_lanes) {
      const double squares = squares_of_group(mine);
      if (lane == 0) {
        add(sum, squares);
      }
    }
    __syncwarp();
  });
  __syncthreads();
  if (threadIdx.x < exact_sum_words) {
    std::int64_t word = 0;
    for (unsigned i = 0; i < groups_per_chunk; ++i) {
      word += words[i][threadIdx.x];
    }
    if (word != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(into) + threadIdx.x, static_cast<unsigned long long>(word));
    }
  }
}

__global__ void carry_kernel(ExactSum* sum) {
  if (threadIdx.x == 0) {
    carry(*sum);
  }
}

}  // namespace

void sum_of_squares(const Cuda& cuda, const ConstNumbers& values, ExactSum* into) {
  const Stretch all = whole_array(values.count, is_octet_aligned(values));
  if (all.chunks_end > 0) {
    launch<sum_kernel>(cuda, "launching a sum of squares", all.chunks_end, values, all, into);
    launch<carry_kernel>(cuda, "launching the carries of a sum", 1, into);
  }
}

}  // namespace ballast::kernels

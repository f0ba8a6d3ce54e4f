// The CUDA backend: the kernels on arrays, and the launch of each after its arguments are checked.
#include "kernels/checks.h"
#include "kernels/cuda_launch.cuh"
#include "kernels/number_octet.h"
#include "kernels/pieces.h"

namespace ballast::kernels {

namespace {

// --- Casts, and the division by a norm ---

__global__ void __launch_bounds__(threads_per_chunk) cast_kernel(ConstNumbers from, Numbers to, Stretch all) {
  each_place(all, [&](const OctetPlace& place) { cast_octet(from, to, place); });
}

__global__ void __launch_bounds__(threads_per_chunk)
    normalize_kernel(ConstNumbers from, const ExactSum* squares, NormBound bound, Numbers to, Stretch all) {
  __shared__ float by;
  if (threadIdx.x == 0) {
    by = divisor(*squares, bound);
  }
  __syncthreads();
  each_place(all, [&](const OctetPlace& place) {
    FloatOctet floats = load_floats(from, place);
    for (float& x : floats.at) {
      x = x / by;
    }
    store_floats(to, place, floats);
  });
}

// --- Sums of squares ---

constexpr unsigned groups_per_chunk = threads_per_chunk / threads_per_group;
constexpr unsigned group_stride = group_size + square_lanes;  // a warp's two groups then lie in different banks

// The squares of a block's values: each group of threads has its own exact sum, to which its first thread adds. At the end all
// these sums are added to the result as integers, so their order does not matter.
struct BlockSquares {
  alignas(16) float numbers[groups_per_chunk * group_stride];
  std::int64_t words[groups_per_chunk][exact_sum_words];
};

__device__ ExactSum& sum_of_group(BlockSquares& block) {
  return *reinterpret_cast<ExactSum*>(block.words[threadIdx.x / threads_per_group]);
}

__device__ void begin_squares(BlockSquares& block) {
  if (threadIdx.x % threads_per_group == 0) sum_of_group(block) = {};
}

// The first eight of a group's threads add up its squares, in the order of sum_of_group() in array_walk.h.
__device__ double squares_of_group(const float* group) {
  const std::uint32_t threads = 0xffu << (threadIdx.x & 16u);
  double sum = squares_of_lane(group, threadIdx.x % threads_per_group);
  for (unsigned distance = square_lanes / 2; distance > 0; distance /= 2) {
    sum = sum + __shfl_xor_sync(threads, sum, distance);
  }
  return sum;
}

__device__ void add_squares(BlockSquares& block, const FloatOctet& floats) {
  const unsigned lane = threadIdx.x % threads_per_group;
  float* const mine = block.numbers + threadIdx.x / threads_per_group * group_stride;
  for (std::size_t i = 0; i < octet_size; ++i) {
    mine[lane * octet_size + i] = floats.at[i];
  }
  __syncwarp();
  if (lane < square_lanes) {
    const double squares = squares_of_group(mine);
    if (lane == 0) add(sum_of_group(block), squares);
  }
  __syncwarp();
}

__device__ void end_squares(const BlockSquares& block, ExactSum* into) {
  __syncthreads();
  if (threadIdx.x < exact_sum_words) {
    std::int64_t word = 0;
    for (unsigned i = 0; i < groups_per_chunk; ++i) {
      word += block.words[i][threadIdx.x];
    }
    if (word != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(into) + threadIdx.x, static_cast<unsigned long long>(word));
    }
  }
}

// Calls each(add), which calls add(floats) for all values of the calling thread, and adds their squares to the result.
template <class Each>
__device__ void sum_squares(ExactSum* into, const Each& each) {
  __shared__ BlockSquares block;
  begin_squares(block);
  each([&](const FloatOctet& floats) { add_squares(block, floats); });
  end_squares(block, into);
}

__global__ void __launch_bounds__(threads_per_chunk) squares_kernel(ConstNumbers values, ExactSum* into, Stretch all) {
  sum_squares(into, [&](const auto& add) {
    each_place(all, [&](const OctetPlace& place) { add(load_floats(values, place)); });
  });
}

// --- Sums of arrays, alone or with the squares of the result ---

__global__ void __launch_bounds__(threads_per_chunk)
    sum_kernel(const __grid_constant__ Summands from, Numbers into, Stretch all) {
  each_place(all, [&](const OctetPlace& place) { sum_octet(from, into, place); });
}

__global__ void __launch_bounds__(threads_per_chunk)
    sum_with_squares_kernel(const __grid_constant__ Summands from, Numbers into, ExactSum* squares, Stretch all) {
  sum_squares(squares, [&](const auto& add) {
    each_place(all, [&](const OctetPlace& place) { add(sum_octet(from, into, place)); });
  });
}

__global__ void __launch_bounds__(threads_per_chunk)
    accumulate_stochastic_kernel(const __grid_constant__ AccumulateTable table) {
  each_chunk(chunks(table.runs), [&](std::size_t chunk) { accumulate_in_chunk(table, chunk, threadIdx.x); });
}

__global__ void __launch_bounds__(threads_per_chunk)
    accumulate_with_squares_kernel(const __grid_constant__ AccumulateTable table, ExactSum* squares) {
  sum_squares(squares, [&](const auto& add) {
    each_chunk(chunks(table.runs), [&](std::size_t chunk) { add(accumulate_in_chunk(table, chunk, threadIdx.x)); });
  });
}

__global__ void carry_kernel(ExactSum* sum) {
  if (threadIdx.x == 0) {
    carry(*sum);
  }
}

void end_squares(const Cuda& cuda, ExactSum* into) {
  launch<carry_kernel>(cuda, "launching the carries of a sum", 1, into);
}

// --- The first NaN or infinity ---

__device__ std::uint64_t lower(std::uint64_t a, std::uint64_t b) { return a < b ? a : b; }

__device__ std::uint64_t lowest_of_warp(std::uint64_t x) {
  for (unsigned distance = 16; distance > 0; distance /= 2) {
    x = lower(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

__global__ void __launch_bounds__(threads_per_chunk)
    search_kernel(ConstNumbers values, std::uint64_t first_index, std::uint64_t* first, Stretch all) {
  const std::uint32_t infinity = infinity_of(values.dtype);
  std::uint64_t found = UINT64_MAX;
  each_place(all, [&](const OctetPlace& place) {
    found = lower(found, first_non_finite_of(load_octet(values, place), infinity, first_index + place.first));
  });
  found = lowest_of_warp(found);
  if (threadIdx.x % 32 == 0 && found != UINT64_MAX) {
    atomicMin(reinterpret_cast<unsigned long long*>(first), static_cast<unsigned long long>(found));
  }
}

// --- Block quantization ---

__global__ void __launch_bounds__(threads_per_chunk)
    quantize_kernel(ConstNumbers from, QuantizedPiece to, CodeRounding rounding, Stretch all) {
  each_place(all, [&](const OctetPlace& place) {
    const FloatOctet floats = load_floats(from, place);
    const GroupScale scale = group_scale(max_of_group(largest_magnitude(floats)), to.bits);
    const std::uint64_t index = rounding.first_index + place.first;
    store_quantized(to, from.count, place, scale, to_codes(floats, scale, to.bits, rounding, index));
  });
}

__global__ void __launch_bounds__(threads_per_chunk)
    dequantize_kernel(ConstQuantizedPiece from, Numbers to, Stretch all) {
  each_place(all, [&](const OctetPlace& place) {
    if (place.count > 0) store_floats(to, place, load_quantized(from, place));
  });
}

__global__ void __launch_bounds__(threads_per_chunk)
    sum_quantized_kernel(const __grid_constant__ QuantizedSummands from, Numbers into, Stretch all) {
  each_place(all, [&](const OctetPlace& place) { sum_quantized_octet(from, into, place); });
}

ConstNumbers numbers(const ConstView& view) { return {view.data(), view.count(), view.dtype()}; }
Numbers numbers(const View& view) { return {view.data(), view.count(), view.dtype()}; }

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(const Cuda& cuda) : cuda_(cuda) {}

  void update(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) override {
    check_update(tile, runs, groups);
    kernels::update(cuda_, tile, runs, groups);
  }

  void cast(const ConstView& from, const View& to) override {
    check_cast(from, to);
    const ConstNumbers source = numbers(from);
    const Numbers target = numbers(to);
    const bool aligned = is_octet_aligned(source) && is_octet_aligned(target);
    launch_on_array<cast_kernel>(cuda_, "launching a cast", target.count, aligned, source, target);
  }

  void clear(const View& to) override {
    check_memory(to, "the target of a clear");
    if (to.bytes() > 0) device::fill(to.data(), 0, to.bytes(), cuda_.stream);
  }

  using Backend::accumulate_stochastic;
  using Backend::sum;
  void sum(std::span<const ConstView> from, const View& into, bool continues, ExactSum* squares) override {
    check_sum(from, into);
    check_passes(from, into);
    const Numbers target = numbers(into);
    std::size_t left = from.size();
    each_pass({from, continues}, 0, target.count, [&](const Summands& summands) {
      const bool aligned = is_octet_aligned(summands) && is_octet_aligned(target);
      constexpr std::string_view what = "launching a sum of arrays";
      left -= summands.arrays;
      if (squares == nullptr || left > 0)
        return launch_on_array<sum_kernel>(cuda_, what, target.count, aligned, summands, target);
      launch_on_array<sum_with_squares_kernel>(cuda_, what, target.count, aligned, summands, target, squares);
    });
    if (squares != nullptr) end_squares(cuda_, squares);
  }

  void accumulate_stochastic(const ConstView& from, const View& into, std::span<const Run> runs,
                             const RoundingPlace& place, ExactSum* squares) override {
    check_accumulate_stochastic(from, into, runs, place);
    each_accumulate_table(numbers(from), numbers(into), runs, place, [&](const AccumulateTable& table) {
      constexpr std::string_view what = "launching a stochastic accumulation";
      const std::size_t count = chunks(table.runs);
      if (squares == nullptr) return launch<accumulate_stochastic_kernel>(cuda_, what, count, table);
      launch<accumulate_with_squares_kernel>(cuda_, what, count, table, squares);
    });
    if (squares != nullptr) end_squares(cuda_, squares);
  }

  void sum_of_squares(const ConstView& values, ExactSum* into) override {
    check_floating(values, "the source of a sum of squares");
    kernels::sum_of_squares(cuda_, numbers(values), into);
  }

  void first_non_finite(const ConstView& values, std::uint64_t first_index, std::uint64_t* first) override {
    check_floating(values, "the source of a search for NaN and infinity");
    const ConstNumbers source = numbers(values);
    launch_on_array<search_kernel>(cuda_, "launching a search for NaN and infinity", source.count,
                                   is_octet_aligned(source), source, first_index, first);
  }

  void quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding) override {
    check_quantize(from, to, rounding);
    const ConstNumbers source = numbers(from);
    launch_on_array<quantize_kernel>(cuda_, "launching a quantization", source.count, is_octet_aligned(source), source,
                                     QuantizedPiece{to.bits, to.blocks.data()}, rounding);
  }

  void dequantize(const ConstQuantized& from, const View& to) override {
    check_dequantize(from, to);
    const Numbers target = numbers(to);
    launch_on_array<dequantize_kernel>(cuda_, "launching a dequantization", target.count, is_octet_aligned(target),
                                       ConstQuantizedPiece{from.bits, from.blocks.data()}, target);
  }

  void sum_quantized(std::span<const ConstView> from, CodeBits bits, const View& into) override {
    check_sum_quantized(from, bits, into);
    check_passes(from, into);
    const Numbers target = numbers(into);
    each_pass({from}, 0, target.count, [&](const Summands& arrays) {
      launch_on_array<sum_quantized_kernel>(cuda_, "launching a sum of quantized arrays", target.count,
                                            is_octet_aligned(target), QuantizedSummands{arrays, bits}, target);
    });
  }

 private:
  Cuda cuda_;
};

}  // namespace

void sum_of_squares(const Cuda& cuda, const ConstNumbers& values, ExactSum* into) {
  if (values.count == 0) return;
  launch_on_array<squares_kernel>(cuda, "launching a sum of squares", values.count, is_octet_aligned(values), values,
                                  into);
  end_squares(cuda, into);
}

void normalize(const Cuda& cuda, const ConstNumbers& from, const ExactSum* squares, const NormBound& bound,
               const Numbers& to) {
  const bool aligned = is_octet_aligned(from) && is_octet_aligned(to);
  launch_on_array<normalize_kernel>(cuda, "launching a division by a norm", from.count, aligned, from, squares, bound,
                                    to);
}

std::unique_ptr<Backend> cuda_backend(StreamHandle stream, int gpu) {
  device::require_gpu(gpu);
  return std::make_unique<CudaBackend>(cuda_on(stream, gpu));
}

}  // namespace ballast::kernels

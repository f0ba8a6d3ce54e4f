// The interface of all kernels. The CPU and the CUDA implementation give the same bits.
#pragma once

#include <memory>
#include <span>

#include "kernels/exact_sum_math.h"
#include "kernels/quantize.h"
#include "kernels/runtime/device.h"
#include "kernels/simd/isa.h"
#include "kernels/update.h"

namespace ballast::kernels {

// Memory: views lie in memory that the backend can access, which is host memory for the CPU, and device or pinned memory
// for CUDA. Order: a call of the CPU backend returns when its work is done. The CUDA backend issues its work into its
// stream and returns at once; it copies all arguments but memory before that.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual void update(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) = 0;
  // Updates several tiles. The threads of the CPU backend begin and end together once, not once for each tile.
  virtual void update_all(std::span<const TileUpdate> tiles, std::span<const GroupStep> groups) {
    for (const auto& [tile, runs] : tiles)
      update(tile, runs, groups);
  }

  // Any of fp32, bf16 and fp16 to any, rounded to nearest, a tie to even; equal formats, u8 too, are copied.
  virtual void cast(const ConstView& from, const View& to) = 0;

  virtual void clear(const View& to) = 0;  // to zeros

  // Computes into = the sum of arrays of one format, in order, in fp32, then rounded once to the format of `into`, to
  // nearest. If it continues, `into` has the sum of arrays before them. If `into` is fp32, the sum has the bits of one that
  // continues with each array, from zeros on. The CUDA backend adds more than Summands::most arrays only into fp32.
  // If there are `squares`, they get those of the result, in the same pass over memory, as from sum_of_squares().
  virtual void sum(std::span<const ConstView> from, const View& into, bool continues, ExactSum* squares) = 0;
  void sum(std::span<const ConstView> from, const View& into, ExactSum* squares = nullptr) {
    sum(from, into, false, squares);
  }
  void accumulate(const ConstView& from, const View& into, ExactSum* squares = nullptr) {
    sum({&from, 1}, into, true, squares);
  }

  // Computes into += from, both in bf16: the sum is in fp32, then rounded stochastically. The random bits of an
  // element depend on the stream, the tensor of its run and its index in the tensor. Elements outside all runs stay as
  // they are; tensors and runs begin at multiples of the group size. If there are `squares`, they get those of the runs.
  virtual void accumulate_stochastic(const ConstView& from, const View& into, std::span<const Run> runs,
                                     const RoundingPlace& place, ExactSum* squares) = 0;
  void accumulate_stochastic(const ConstView& from, const View& into, std::span<const Run> runs,
                             const RoundingPlace& place) {
    accumulate_stochastic(from, into, runs, place, nullptr);
  }

  // Adds the squares to *into, which begins as {} or comes from an earlier call. The sum is exact (exact_sum_math.h),
  // so the order of calls does not matter: calls on parts, cut at multiples of the group size, give the bits of one
  // call on the whole.
  virtual void sum_of_squares(const ConstView& values, ExactSum* into) = 0;

  // *first = min(*first, index of the first NaN or infinity), where the first element has the index `first_index`.
  virtual void first_non_finite(const ConstView& values, std::uint64_t first_index, std::uint64_t* first) = 0;

  // See quantize_math.h.
  virtual void quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding) = 0;
  virtual void dequantize(const ConstQuantized& from, const View& to) = 0;

  // Computes into = the sum of quantized arrays, with the bits of sum() of what dequantize() makes of each in fp32, in
  // one pass over memory. The CUDA backend adds more than Summands::most arrays only into fp32.
  virtual void sum_quantized(std::span<const ConstView> from, CodeBits bits, const View& into) = 0;
};

inline constexpr std::uint64_t no_index = UINT64_MAX;  // the value of *first if the search finds nothing

struct CpuOptions {
  int threads = 0;  // 0: the cores this process may use
  simd::Isa isa = simd::usable_isas().front();
};

std::unique_ptr<Backend> cpu_backend(CpuOptions options = {});

// Throws B2101 in builds without CUDA, and B2102 if there is no such GPU. The caller owns the stream (null: the default
// stream), which outlives the backend.
std::unique_ptr<Backend> cuda_backend(StreamHandle stream, int gpu = 0);

}  // namespace ballast::kernels

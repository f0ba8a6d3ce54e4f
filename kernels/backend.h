// Where the arithmetic happens. One interface over all kernels; a CPU and a CUDA implementation give the same bits.
#pragma once

#include <memory>

#include "kernels/copy_pieces.h"
#include "kernels/exact_sum_math.h"
#include "kernels/quantize.h"
#include "kernels/runtime/device.h"
#include "kernels/simd/isa.h"
#include "kernels/update.h"

namespace ballast::kernels {

// Views must lie in memory that the backend reaches: host memory for the CPU, device or pinned memory for CUDA.
// The CPU backend is done when a call returns. The CUDA backend orders its work on its stream and returns at once;
// arguments other than memory are copied before that.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual void update(const UpdateTile& tile, std::span<const Run> runs, std::span<const GroupStep> groups) = 0;

  // Any of fp32, bf16 and fp16 to any, rounded to nearest, a tie to even; equal formats, u8 too, are copied.
  virtual void cast(const ConstView& from, const View& to) = 0;

  // Many casts and copies in one call: packing and unpacking. No piece may write what another reads or writes.
  virtual void copy_pieces(std::span<const CopyPiece> pieces) = 0;

  virtual void fill(const View& to, float value) = 0;

  // into = from, as accumulate() leaves it on zeros, which are not read: -0 becomes 0.
  virtual void begin_sum(const ConstView& from, const View& into) = 0;

  // into += scale * from, in fp32, then rounded to the format of `into`.
  virtual void accumulate(const ConstView& from, float scale, const View& into) = 0;

  // Adds the squares to *into, which begins as {} or comes from an earlier call. Order does not matter, see
  // exact_sum_math.h: calls on the parts of an array, cut at multiples of the group size, give what one on the whole gives.
  virtual void sum_of_squares(const ConstView& values, ExactSum* into) = 0;

  // *first = min(*first, index of the first NaN or infinity), where the first element has the index `first_index`.
  virtual void first_non_finite(const ConstView& values, std::uint64_t first_index, std::uint64_t* first) = 0;

  // See quantize_math.h.
  virtual void quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding) = 0;
  virtual void dequantize(const ConstQuantized& from, const View& to) = 0;
};

inline constexpr std::uint64_t no_index = UINT64_MAX;  // what a search that found nothing leaves in *first

struct CpuOptions {
  int threads = 0;  // 0: the cores this process may use
  simd::Isa isa = simd::usable_isas().front();
};

std::unique_ptr<Backend> cpu_backend(CpuOptions options = {});

// Throws B2101 where CUDA is not built, B2102 where there is no such GPU. The stream, null for the default one, is the
// caller's and outlives the backend.
std::unique_ptr<Backend> cuda_backend(StreamHandle stream, int gpu = 0);

}  // namespace ballast::kernels

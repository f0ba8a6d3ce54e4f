#include <bit>

#include "kernels/backend.h"
#include "kernels/checks.h"
#include "kernels/cuda.h"
#include "kernels/pieces.h"

namespace ballast::kernels {
namespace {

ConstNumbers numbers(const ConstView& view) { return {view.data(), view.count(), view.dtype()}; }
Numbers numbers(const View& view) { return {view.data(), view.count(), view.dtype()}; }

CastTask task(const ConstView& from, const View& to) { return {numbers(from), numbers(to)}; }

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(const Cuda& cuda) : cuda_(cuda) {}

  void update(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) override {
    check_update(tile, runs, groups);
    kernels::update(cuda_, tile, runs, groups);
  }

  void cast(const ConstView& from, const View& to) override {
    check_cast(from, to);
    kernels::cast(cuda_, task(from, to));
  }

  void copy_pieces(std::span<const CopyPiece> pieces) override {
    check_pieces(pieces);
    std::vector<CastTask> tasks;
    tasks.reserve(pieces.size());
    for (const CopyPiece& piece : pieces) {
      tasks.push_back(task(piece.from, piece.to));
    }
    kernels::cast_all(cuda_, tasks);
  }

  void fill(const View& to, float value) override {
    check_fill(to, value);
    const bool is_all_zeros = std::bit_cast<std::uint32_t>(value) == 0;  // not -0
    if (is_all_zeros && to.bytes() > 0) return device::fill(to.data(), 0, to.bytes(), cuda_.stream);
    kernels::fill(cuda_, numbers(to), value);
  }

  void accumulate(const ConstView& from, float scale, const View& into) override {
    check_accumulate(from, into);
    kernels::accumulate(cuda_, numbers(from), scale, numbers(into));
  }

  void sum(std::span<const ConstView> from, const View& into) override {
    check_sum(from, into);
    check_passes(from, into);
    each_pass(from, 0, into.count(), [&](const Summands& summands) { kernels::sum(cuda_, summands, numbers(into)); });
  }

  void accumulate_stochastic(const ConstView& from, const View& into, std::span<const Run> runs,
                             const RoundingPlace& place) override {
    check_accumulate_stochastic(from, into, runs, place);
    kernels::accumulate_stochastic(cuda_, numbers(from), numbers(into), runs, place);
  }

  void sum_of_squares(const ConstView& values, ExactSum* into) override {
    check_floating(values, "the source of a sum of squares");
    kernels::sum_of_squares(cuda_, numbers(values), into);
  }

  void first_non_finite(const ConstView& values, std::uint64_t first_index, std::uint64_t* first) override {
    check_floating(values, "the source of a search for NaN and infinity");
    kernels::first_non_finite(cuda_, numbers(values), first_index, first);
  }

  void quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding) override {
    check_quantize(from, to, rounding);
    kernels::quantize(cuda_, numbers(from), {to.bits, to.blocks.data()}, rounding);
  }

  void dequantize(const ConstQuantized& from, const View& to) override {
    check_dequantize(from, to);
    kernels::dequantize(cuda_, {from.bits, from.blocks.data()}, numbers(to));
  }

  void sum_quantized(std::span<const ConstView> from, CodeBits bits, const View& into) override {
    check_sum_quantized(from, bits, into);
    check_passes(from, into);
    each_pass(from, 0, into.count(), [&](const Summands& arrays) {
      kernels::sum_quantized(cuda_, {arrays, bits}, numbers(into));
    });
  }

 private:
  Cuda cuda_;
};

}  // namespace

std::unique_ptr<Backend> cuda_backend(StreamHandle stream, int gpu) {
  device::require_gpu(gpu);
  return std::make_unique<CudaBackend>(cuda_on(stream, gpu));
}

}  // namespace ballast::kernels

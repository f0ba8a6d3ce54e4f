#include <oneapi/tbb/info.h>

#include "kernels/backend.h"
#include "kernels/cpu.h"

namespace ballast::kernels {
namespace {

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const CpuOptions& options) : cpu_(cpu_of(options)) {}

  void update(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) override {
    kernels::update(cpu_, tile, runs, groups);
  }
  void cast(const ConstView& from, const View& to) override { kernels::cast(cpu_, from, to); }
  void fill(const View& to, float value) override { kernels::fill(cpu_, to, value); }
  void accumulate(const ConstView& from, float scale, const View& into) override {
    kernels::accumulate(cpu_, from, scale, into);
  }
  void sum(std::span<const ConstView> from, const View& into) override { kernels::sum(cpu_, from, into); }
  void accumulate_stochastic(const ConstView& from, const View& into, std::span<const Run> runs,
                             const RoundingPlace& place) override {
    kernels::accumulate_stochastic(cpu_, from, into, runs, place);
  }
  void sum_of_squares(const ConstView& values, ExactSum* into) override { kernels::sum_of_squares(cpu_, values, into); }
  void first_non_finite(const ConstView& values, std::uint64_t first_index, std::uint64_t* first) override {
    kernels::first_non_finite(cpu_, values, first_index, first);
  }
  void copy_pieces(std::span<const CopyPiece> pieces) override { kernels::copy_pieces(cpu_, pieces); }
  void quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding) override {
    kernels::quantize(cpu_, from, to, rounding);
  }
  void dequantize(const ConstQuantized& from, const View& to) override { kernels::dequantize(cpu_, from, to); }
  void sum_quantized(std::span<const ConstView> from, CodeBits bits, const View& into) override {
    kernels::sum_quantized(cpu_, from, bits, into);
  }

 private:
  Cpu cpu_;
};

}  // namespace

Cpu cpu_of(const CpuOptions& options) {
  return {walks_for(options.isa),
          Threads(options.threads > 0 ? options.threads : oneapi::tbb::info::default_concurrency())};
}

std::unique_ptr<Backend> cpu_backend(CpuOptions options) { return std::make_unique<CpuBackend>(options); }

}  // namespace ballast::kernels

// Replaces kernels/backend_cuda.cpp: a stream's thread runs the CPU's kernels.
#include "kernels/backend.h"
#include "tests/emulated_gpu/memory.h"
#include "tests/emulated_gpu/streams.h"

namespace ballast::kernels {
namespace {

using testing::reachable;

// Returns the real address of a pointer of any kind.
template <class T>
T* moved(T* pointer) {
  return pointer == nullptr ? nullptr : static_cast<T*>(reachable(pointer));
}
template <>
const std::byte* moved(const std::byte* pointer) {
  return static_cast<const std::byte*>(reachable(pointer));
}

class EmulatedBackend : public Backend {
 public:
  explicit EmulatedBackend(StreamHandle stream) : stream_(testing::stream_of(stream)) {}

  void update(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) override {
    check_update(tile, runs, groups);
    TileMemory real = tile;
    real.parameter = moved(tile.parameter);
    real.gradient = moved(tile.gradient);
    real.master = moved(tile.master);
    real.momentum = moved(tile.momentum);
    real.variance = moved(tile.variance);
    real.momentum_scales = moved(tile.momentum_scales);
    real.variance_scales = moved(tile.variance_scales);
    issue([real, runs = std::vector(runs.begin(), runs.end()),
           groups = std::vector(groups.begin(), groups.end())](Backend& cpu) { cpu.update(real, runs, groups); });
  }

  void cast(const ConstView& from, const View& to) override {
    issue([from = reachable(from), to = reachable(to)](Backend& cpu) { cpu.cast(from, to); });
  }

  void copy_pieces(std::span<const CopyPiece> pieces) override {
    std::vector<CopyPiece> real;
    for (const CopyPiece& piece : pieces) {
      real.push_back({reachable(piece.from), reachable(piece.to)});
    }
    issue([real = std::move(real)](Backend& cpu) { cpu.copy_pieces(real); });
  }

  void fill(const View& to, float value) override {
    issue([to = reachable(to), value](Backend& cpu) { cpu.fill(to, value); });
  }

  void begin_sum(const ConstView& from, const View& into) override {
    issue([from = reachable(from), into = reachable(into)](Backend& cpu) { cpu.begin_sum(from, into); });
  }

  void accumulate(const ConstView& from, float scale, const View& into) override {
    issue([from = reachable(from), scale, into = reachable(into)](Backend& cpu) { cpu.accumulate(from, scale, into); });
  }

  void sum(std::span<const ConstView> from, const View& into) override {
    std::vector<ConstView> real;
    for (const ConstView& each : from) {
      real.push_back(reachable(each));
    }
    issue([real = std::move(real), into = reachable(into)](Backend& cpu) { cpu.sum(real, into); });
  }

  void sum_of_squares(const ConstView& values, ExactSum* into) override {
    issue([values = reachable(values), into = moved(into)](Backend& cpu) { cpu.sum_of_squares(values, into); });
  }

  void first_non_finite(const ConstView& values, std::uint64_t first_index, std::uint64_t* first) override {
    issue([values = reachable(values), first_index, first = moved(first)](Backend& cpu) {
      cpu.first_non_finite(values, first_index, first);
    });
  }

  void quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding) override {
    const Quantized real{.bits = to.bits, .codes = reachable(to.codes), .scales = reachable(to.scales)};
    issue([from = reachable(from), real, rounding](Backend& cpu) { cpu.quantize(from, real, rounding); });
  }

  void dequantize(const ConstQuantized& from, const View& to) override {
    const ConstQuantized real{.bits = from.bits, .codes = reachable(from.codes), .scales = reachable(from.scales)};
    issue([real, to = reachable(to)](Backend& cpu) { cpu.dequantize(real, to); });
  }

 private:
  template <class Work>
  void issue(Work work) {
    stream_.add([cpu = cpu_, work = std::move(work)] { work(*cpu); });
  }

  CUstream_st& stream_;
  std::shared_ptr<Backend> cpu_ = cpu_backend({.threads = 1});
};

}  // namespace

std::unique_ptr<Backend> cuda_backend(StreamHandle stream, int gpu) {
  device::require_gpu(gpu);
  return std::make_unique<EmulatedBackend>(stream);
}

}  // namespace ballast::kernels

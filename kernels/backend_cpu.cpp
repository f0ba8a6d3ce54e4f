// The kernels of the CPU: each checks its arguments, cuts its work into pieces for threads, and walks each piece.
#include <oneapi/tbb/info.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "kernels/checks.h"
#include "kernels/cpu.h"
#include "kernels/pieces.h"
#include "kernels/random_math.h"

namespace ballast::kernels {

namespace {

// Adds the squares of pieces to a sum, if there is one. Any thread may add.
class SharedSquares {
 public:
  SharedSquares(const Cpu& cpu, ExactSum* into) : cpu_(cpu), into_(into) {}

  void add(const ConstNumbers& piece) {  // at most elements_per_task
    if (into_ == nullptr) return;
    double sums[elements_per_task / group_size];
    cpu_.walks.sum_of_squares(piece, sums);
    ExactSum mine;
    for (std::size_t group = 0; group * group_size < piece.count; ++group) {
      kernels::add(mine, sums[group]);
    }
    const std::lock_guard lock(guard_);
    merge(*into_, mine);
  }
  void add(const Numbers& piece) { add(ConstNumbers{piece.data, piece.count, piece.dtype}); }

 private:
  const Cpu& cpu_;
  ExactSum* into_;
  std::mutex guard_;  // guards the sum
};

}  // namespace

void sum_of_squares(const Cpu& cpu, const ConstView& values, ExactSum* into) {
  check_floating(values, "the source of a sum of squares");
  SharedSquares squares(cpu, into);
  each_piece(cpu.threads, values.count(),
             [&](std::size_t first, std::size_t count) { squares.add(numbers(values, first, count)); });
}

namespace {

constexpr std::size_t arrays_in_a_pass = 32;  // arrays of a sum; the CPU's prefetchers follow as many

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const CpuOptions& options) : cpu_(cpu_of(options)) {}

  void update(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) override {
    const TileUpdate update{tile, {runs.begin(), runs.end()}};
    update_all({&update, 1}, groups);
  }

  void update_all(std::span<const TileUpdate> tiles, std::span<const GroupStep> groups) override {
    struct PieceOfTile {
      const TileMemory* tile;
      Run run;
    };
    std::vector<PieceOfTile> pieces;
    for (const auto& [tile, runs] : tiles) {
      check_update(tile, runs, groups);
      for (const Run& piece : cut(runs))
        pieces.push_back({&tile, piece});
    }
    cpu_.threads.each(pieces.size(), [&](std::size_t i) {
      const auto& [tile, piece] = pieces[i];
      TileMemory of_piece = part(*tile, piece.begin, piece.count);
      of_piece.first_index -= piece.tensor_begin;  // random bits belong to the tensor
      of_piece.rounding_stream = stream_of_tensor(tile->rounding_stream, piece.tensor);
      cpu_.walks.update(of_piece, groups[piece.group]);
    });
  }

  void cast(const ConstView& from, const View& to) override {
    check_cast(from, to);
    const Stores stores = stores_for(to.bytes());
    each_piece(cpu_.threads, from.count(), [&](std::size_t first, std::size_t count) {
      cpu_.walks.cast(numbers(from, first, count), numbers(to, first, count), stores);
    });
  }

  void clear(const View& to) override {
    check_memory(to, "the target of a clear");
    each_piece(cpu_.threads, to.bytes(),
               [&](std::size_t first, std::size_t bytes) { std::memset(to.data() + first, 0, bytes); });
  }

  using Backend::accumulate_stochastic;
  using Backend::sum;
  void sum(std::span<const ConstView> from, const View& into, bool continues, ExactSum* squares) override {
    check_sum(from, into);
    sum_in_passes(
        {from, continues}, into, squares, [](std::size_t first) { return first; },
        [&](const Summands& arrays, const Numbers& to, Stores stores) { cpu_.walks.sum(arrays, to, stores); });
  }

  void accumulate_stochastic(const ConstView& from, const View& into, std::span<const Run> runs,
                             const RoundingPlace& place, ExactSum* squares) override {
    check_accumulate_stochastic(from, into, runs, place);
    const std::vector<Run> pieces = cut(runs);
    SharedSquares squared(cpu_, squares);
    cpu_.threads.each(pieces.size(), [&](std::size_t i) {
      const Run& piece = pieces[i];
      const Numbers target = numbers(into, piece.begin, piece.count);
      cpu_.walks.accumulate_stochastic(numbers(from, piece.begin, piece.count), target,
                                       stream_of_tensor(place.stream, piece.tensor), index_in_tensor(piece, place));
      squared.add(target);
    });
  }

  void sum_of_squares(const ConstView& values, ExactSum* into) override { kernels::sum_of_squares(cpu_, values, into); }

  void first_non_finite(const ConstView& values, std::uint64_t first_index, std::uint64_t* first) override {
    check_floating(values, "the source of a search for NaN and infinity");
    std::atomic<std::size_t> found = values.count();  // the least position found so far
    each_piece(cpu_.threads, values.count(), [&](std::size_t begin, std::size_t count) {
      std::size_t least = found;
      if (begin >= least) {
        return;
      }
      const std::size_t position = begin + cpu_.walks.first_non_finite(numbers(values, begin, count));
      while (position < begin + count && position < least && !found.compare_exchange_weak(least, position)) {
      }
    });
    if (found < values.count()) {
      *first = std::min(*first, first_index + found);
    }
  }

  void quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding) override {
    check_quantize(from, to, rounding);
    each_piece(cpu_.threads, from.count(), [&](std::size_t first, std::size_t count) {
      CodeRounding here = rounding;
      here.first_index += first;
      cpu_.walks.quantize(numbers(from, first, count), {to.bits, to.blocks.data() + quantized_bytes(first, to.bits)},
                          here);
    });
  }

  void dequantize(const ConstQuantized& from, const View& to) override {
    check_dequantize(from, to);
    const Stores stores = stores_for(to.bytes());
    each_piece(cpu_.threads, to.count(), [&](std::size_t first, std::size_t count) {
      cpu_.walks.dequantize({from.bits, from.blocks.data() + quantized_bytes(first, from.bits)},
                            numbers(to, first, count), stores);
    });
  }

  void sum_quantized(std::span<const ConstView> from, CodeBits bits, const View& into) override {
    check_sum_quantized(from, bits, into);
    sum_in_passes(
        {from}, into, nullptr, [&](std::size_t first) { return quantized_bytes(first, bits); },
        [&](const Summands& arrays, const Numbers& to, Stores) {
          cpu_.walks.sum_quantized({arrays, bits}, to);
        });
  }

 private:
  // Adds in one pass or in several, by add(arrays, to, stores), and rounds when all is added. place_of(i) is the place of the
  // sum's element i in each array. A piece is still in the caches when its squares are added.
  template <class PlaceOf, class Add>
  void sum_in_passes(const SummedViews& from, const View& into, ExactSum* squares, const PlaceOf& place_of,
                     const Add& add) const {
    const bool in_one_pass = from.arrays.size() <= arrays_in_a_pass;
    const bool is_read_again = !in_one_pass || from.continues || squares != nullptr;
    const Stores stores = is_read_again ? Stores::cached : stores_for(into.bytes());
    SharedSquares squared(cpu_, squares);
    each_piece(cpu_.threads, into.count(), [&](std::size_t first, std::size_t count) {
      const auto add_all = [&](const Numbers& to) {
        each_pass(
            from, place_of(first), count, [&](const Summands& arrays) { add(arrays, to, stores); }, arrays_in_a_pass);
      };
      const Numbers target = numbers(into, first, count);
      if (in_one_pass || into.dtype() == DType::fp32) {
        add_all(target);
      } else {
        std::vector<float> sums(count);
        const Numbers sum{reinterpret_cast<std::byte*>(sums.data()), count, DType::fp32};
        if (from.continues) cpu_.walks.cast({target.data, count, target.dtype}, sum, Stores::cached);
        add_all(sum);
        cpu_.walks.cast({sum.data, sum.count, sum.dtype}, target, Stores::cached);
      }
      squared.add(target);
    });
  }

  Cpu cpu_;
};

}  // namespace

Cpu cpu_of(const CpuOptions& options) {
  return {walks_for(options.isa),
          Threads(options.threads > 0 ? options.threads : oneapi::tbb::info::default_concurrency())};
}

std::unique_ptr<Backend> cpu_backend(CpuOptions options) { return std::make_unique<CpuBackend>(options); }

}  // namespace ballast::kernels

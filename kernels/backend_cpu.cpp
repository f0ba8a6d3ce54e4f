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

// --- Packing and unpacking ---

namespace {

constexpr std::size_t cut_multiple = 128;
constexpr std::size_t work_to_start = 128;  // the cost of starting a piece, in elements

// Converts the first `work` of a piece to elements.
std::size_t elements_of(std::size_t work, std::size_t count) {
  return work >= count ? count : work / cut_multiple * cut_multiple;
}

}  // namespace

CopyPlan::CopyPlan(std::span<const CopyPiece> pieces, std::size_t work_of_part) : work_of_part_(work_of_part) {
  counts_.reserve(pieces.size());
  ends_.reserve(pieces.size());
  std::size_t work = 0;
  for (const CopyPiece& piece : pieces) {
    work += piece.from.count() + work_to_start;
    counts_.push_back(piece.from.count());
    ends_.push_back(work);
  }
}

std::size_t CopyPlan::parts() const { return ends_.empty() ? 0 : (ends_.back() + work_of_part_ - 1) / work_of_part_; }

std::vector<CopyStretch> CopyPlan::part(std::size_t index) const {
  const std::size_t begin = index * work_of_part_;
  const std::size_t end = std::min(begin + work_of_part_, ends_.back());
  auto piece = static_cast<std::size_t>(std::ranges::upper_bound(ends_, begin) - ends_.begin());
  std::vector<CopyStretch> stretches;
  for (; piece < ends_.size(); ++piece) {
    const std::size_t start = ends_[piece] - counts_[piece] - work_to_start;
    if (start >= end) {
      break;
    }
    const std::size_t first = begin > start ? elements_of(begin - start, counts_[piece]) : 0;
    const std::size_t last = elements_of(std::min(end, ends_[piece]) - start, counts_[piece]);
    if (first < last) {
      stretches.push_back({piece, first, last});
    }
  }
  return stretches;
}

// --- The backend ---

void sum_of_squares(const Cpu& cpu, const ConstView& values, ExactSum* into) {
  check_floating(values, "the source of a sum of squares");
  std::mutex guard;
  each_piece(cpu.threads, values.count(), [&](std::size_t first, std::size_t count) {
    double sums[elements_per_task / group_size];
    cpu.walks.sum_of_squares(numbers(values, first, count), sums);
    ExactSum mine;
    for (std::size_t group = 0; group * group_size < count; ++group) {
      add(mine, sums[group]);
    }
    const std::lock_guard lock(guard);
    merge(*into, mine);
  });
}

namespace {

constexpr std::size_t arrays_in_a_pass = 32;  // arrays of a sum; the CPU's prefetchers follow as many

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const CpuOptions& options) : cpu_(cpu_of(options)) {}

  void update(const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) override {
    check_update(tile, runs, groups);
    const std::vector<Run> pieces = cut(runs);
    cpu_.threads.each(pieces.size(), [&](std::size_t i) {
      const Run& piece = pieces[i];
      TileMemory of_piece = part(tile, piece.begin, piece.count);
      of_piece.first_index -= piece.tensor_begin;  // random bits belong to the tensor
      of_piece.rounding_stream = stream_of_tensor(tile.rounding_stream, piece.tensor);
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

  void copy_pieces(std::span<const CopyPiece> pieces) override {
    check_pieces(pieces);
    std::size_t bytes = 0;
    for (const CopyPiece& piece : pieces) {
      bytes += piece.to.bytes();
    }
    const Stores stores = stores_for(bytes);
    const CopyPlan plan(pieces, elements_per_task);
    cpu_.threads.each(plan.parts(), [&](std::size_t i) {
      for (const CopyStretch& stretch : plan.part(i)) {
        const CopyPiece& piece = pieces[stretch.piece];
        const std::size_t count = stretch.end - stretch.begin;
        cpu_.walks.cast(numbers(piece.from, stretch.begin, count), numbers(piece.to, stretch.begin, count), stores);
      }
    });
  }

  void fill(const View& to, float value) override {
    check_fill(to, value);
    const Stores stores = stores_for(to.bytes());
    each_piece(cpu_.threads, to.count(), [&](std::size_t first, std::size_t count) {
      if (to.dtype() == DType::u8) {
        std::memset(to.data() + first, static_cast<int>(value), count);
      } else {
        cpu_.walks.fill(numbers(to, first, count), value, stores);
      }
    });
  }

  void accumulate(const ConstView& from, float scale, const View& into) override {
    check_accumulate(from, into);
    each_piece(cpu_.threads, from.count(), [&](std::size_t first, std::size_t count) {
      cpu_.walks.accumulate(numbers(from, first, count), scale, numbers(into, first, count));
    });
  }

  void sum(std::span<const ConstView> from, const View& into) override {
    check_sum(from, into);
    const bool in_one_pass = from.size() <= arrays_in_a_pass;
    const Stores stores = in_one_pass ? stores_for(into.bytes()) : Stores::cached;
    each_piece(cpu_.threads, into.count(), [&](std::size_t first, std::size_t count) {
      const Numbers target = numbers(into, first, count);
      if (!in_one_pass && into.dtype() != DType::fp32) return sum_and_round(from, first, target);
      each_pass(
          from, first, count, [&](const Summands& summands) { cpu_.walks.sum(summands, target, stores); },
          arrays_in_a_pass);
    });
  }

  void accumulate_stochastic(const ConstView& from, const View& into, std::span<const Run> runs,
                             const RoundingPlace& place) override {
    check_accumulate_stochastic(from, into, runs, place);
    const std::vector<Run> pieces = cut(runs);
    cpu_.threads.each(pieces.size(), [&](std::size_t i) {
      const Run& piece = pieces[i];
      cpu_.walks.accumulate_stochastic(numbers(from, piece.begin, piece.count), numbers(into, piece.begin, piece.count),
                                       stream_of_tensor(place.stream, piece.tensor), index_in_tensor(piece, place));
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

  // A sum of several passes is rounded when all is added.
  void sum_quantized(std::span<const ConstView> from, CodeBits bits, const View& into) override {
    check_sum_quantized(from, bits, into);
    const bool in_one_pass = from.size() <= arrays_in_a_pass || into.dtype() == DType::fp32;
    each_piece(cpu_.threads, into.count(), [&](std::size_t first, std::size_t count) {
      const Numbers target = numbers(into, first, count);
      if (in_one_pass) return sum_in_passes(from, bits, first, target);
      std::vector<float> sums(count);
      const Numbers sum{reinterpret_cast<std::byte*>(sums.data()), count, DType::fp32};
      sum_in_passes(from, bits, first, sum);
      cpu_.walks.cast({sum.data, sum.count, sum.dtype}, target, Stores::cached);
    });
  }

 private:
  // Adds in several passes, and rounds when all is added.
  void sum_and_round(std::span<const ConstView> from, std::size_t first, const Numbers& into) const {
    std::vector<float> sums(into.count);
    const Numbers sum{reinterpret_cast<std::byte*>(sums.data()), sums.size(), DType::fp32};
    each_pass(
        from, first, into.count, [&](const Summands& summands) { cpu_.walks.sum(summands, sum, Stores::cached); },
        arrays_in_a_pass);
    cpu_.walks.cast({sum.data, sum.count, sum.dtype}, into, Stores::cached);
  }

  void sum_in_passes(const std::span<const ConstView> from, CodeBits bits, std::size_t first,
                     const Numbers& into) const {
    each_pass(
        from, quantized_bytes(first, bits), into.count,
        [&](const Summands& arrays) {
          cpu_.walks.sum_quantized({arrays, bits}, into);
        },
        arrays_in_a_pass);
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

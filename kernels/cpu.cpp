// The kernels of the CPU: each checks its arguments, cuts its work into pieces for threads, and walks each piece.
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "kernels/checks.h"
#include "kernels/cpu.h"
#include "kernels/pieces.h"
#include "kernels/quantize.h"
#include "kernels/random_math.h"
#include "kernels/summands.h"

namespace ballast::kernels {

void fill(const Cpu& cpu, const View& to, float value) {
  check_fill(to, value);
  const Stores stores = stores_for(to.bytes());
  each_piece(cpu.threads, to.count(), [&](std::size_t first, std::size_t count) {
    if (to.dtype() == DType::u8) {
      std::memset(to.data() + first, static_cast<int>(value), count);
    } else {
      cpu.walks.fill(numbers(to, first, count), value, stores);
    }
  });
}

void cast(const Cpu& cpu, const ConstView& from, const View& to) {
  check_cast(from, to);
  const Stores stores = stores_for(to.bytes());
  each_piece(cpu.threads, from.count(), [&](std::size_t first, std::size_t count) {
    cpu.walks.cast(numbers(from, first, count), numbers(to, first, count), stores);
  });
}

void copy_pieces(const Cpu& cpu, std::span<const CopyPiece> pieces) {
  check_pieces(pieces);
  std::size_t bytes = 0;
  for (const CopyPiece& piece : pieces) {
    bytes += piece.to.bytes();
  }
  const Stores stores = stores_for(bytes);
  const CopyPlan plan(pieces, elements_per_task);
  cpu.threads.each(plan.parts(), [&](std::size_t i) {
    for (const CopyStretch& stretch : plan.part(i)) {
      const CopyPiece& piece = pieces[stretch.piece];
      const std::size_t count = stretch.end - stretch.begin;
      cpu.walks.cast(numbers(piece.from, stretch.begin, count), numbers(piece.to, stretch.begin, count), stores);
    }
  });
}

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

void first_non_finite(const Cpu& cpu, const ConstView& values, std::uint64_t first_index, std::uint64_t* first) {
  check_floating(values, "the source of a search for NaN and infinity");
  std::atomic<std::size_t> found = values.count();  // the least position found so far
  each_piece(cpu.threads, values.count(), [&](std::size_t begin, std::size_t count) {
    std::size_t least = found;
    if (begin >= least) {
      return;
    }
    const std::size_t position = begin + cpu.walks.first_non_finite(numbers(values, begin, count));
    while (position < begin + count && position < least && !found.compare_exchange_weak(least, position)) {
    }
  });
  if (found < values.count()) {
    *first = std::min(*first, first_index + found);
  }
}

namespace {

// Adds in several passes, and rounds when all is added.
void sum_and_round(const Cpu& cpu, std::span<const ConstView> from, std::size_t first, const Numbers& into) {
  std::vector<float> sums(into.count);
  const Numbers sum{reinterpret_cast<std::byte*>(sums.data()), sums.size(), DType::fp32};
  each_pass(
      from, first, into.count, [&](const Summands& summands) { cpu.walks.sum(summands, sum, Stores::cached); },
      arrays_in_a_pass);
  cpu.walks.cast({sum.data, sum.count, sum.dtype}, into, Stores::cached);
}

}  // namespace

void accumulate(const Cpu& cpu, const ConstView& from, float scale, const View& into) {
  check_accumulate(from, into);
  each_piece(cpu.threads, from.count(), [&](std::size_t first, std::size_t count) {
    cpu.walks.accumulate(numbers(from, first, count), scale, numbers(into, first, count));
  });
}

void sum(const Cpu& cpu, std::span<const ConstView> from, const View& into) {
  check_sum(from, into);
  const bool in_one_pass = from.size() <= arrays_in_a_pass;
  const Stores stores = in_one_pass ? stores_for(into.bytes()) : Stores::cached;
  each_piece(cpu.threads, into.count(), [&](std::size_t first, std::size_t count) {
    const Numbers target = numbers(into, first, count);
    if (!in_one_pass && into.dtype() != DType::fp32) return sum_and_round(cpu, from, first, target);
    each_pass(
        from, first, count, [&](const Summands& summands) { cpu.walks.sum(summands, target, stores); },
        arrays_in_a_pass);
  });
}

void accumulate_stochastic(const Cpu& cpu, const ConstView& from, const View& into, std::span<const Run> runs,
                           const RoundingPlace& place) {
  check_accumulate_stochastic(from, into, runs, place);
  const std::vector<Run> pieces = cut(runs);
  cpu.threads.each(pieces.size(), [&](std::size_t i) {
    const Run& piece = pieces[i];
    cpu.walks.accumulate_stochastic(numbers(from, piece.begin, piece.count), numbers(into, piece.begin, piece.count),
                                    stream_of_tensor(place.stream, piece.tensor), index_in_tensor(piece, place));
  });
}

namespace {

void sum_in_passes(const Cpu& cpu, const std::span<const ConstView> from, CodeBits bits, std::size_t first,
                   const Numbers& into) {
  each_pass(
      from, quantized_bytes(first, bits), into.count,
      [&](const Summands& arrays) {
        cpu.walks.sum_quantized({arrays, bits}, into);
      },
      arrays_in_a_pass);
}

}  // namespace

void quantize(const Cpu& cpu, const ConstView& from, const Quantized& to, const CodeRounding& rounding) {
  check_quantize(from, to, rounding);
  each_piece(cpu.threads, from.count(), [&](std::size_t first, std::size_t count) {
    CodeRounding here = rounding;
    here.first_index += first;
    cpu.walks.quantize(numbers(from, first, count), {to.bits, to.blocks.data() + quantized_bytes(first, to.bits)},
                       here);
  });
}

void dequantize(const Cpu& cpu, const ConstQuantized& from, const View& to) {
  check_dequantize(from, to);
  const Stores stores = stores_for(to.bytes());
  each_piece(cpu.threads, to.count(), [&](std::size_t first, std::size_t count) {
    cpu.walks.dequantize({from.bits, from.blocks.data() + quantized_bytes(first, from.bits)}, numbers(to, first, count),
                         stores);
  });
}

// A sum of several passes is rounded when all is added.
void sum_quantized(const Cpu& cpu, std::span<const ConstView> from, CodeBits bits, const View& into) {
  check_sum_quantized(from, bits, into);
  const bool in_one_pass = from.size() <= arrays_in_a_pass || into.dtype() == DType::fp32;
  each_piece(cpu.threads, into.count(), [&](std::size_t first, std::size_t count) {
    const Numbers target = numbers(into, first, count);
    if (in_one_pass) return sum_in_passes(cpu, from, bits, first, target);
    std::vector<float> sums(count);
    const Numbers sum{reinterpret_cast<std::byte*>(sums.data()), count, DType::fp32};
    sum_in_passes(cpu, from, bits, first, sum);
    cpu.walks.cast({sum.data, sum.count, sum.dtype}, target, Stores::cached);
  });
}

void update(const Cpu& cpu, const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) {
  check_update(tile, runs, groups);
  const std::vector<Run> pieces = cut(runs);
  cpu.threads.each(pieces.size(), [&](std::size_t i) {
    const Run& piece = pieces[i];
    TileMemory of_piece = part(tile, piece.begin, piece.count);
    of_piece.first_index -= piece.tensor_begin;  // random bits belong to the tensor
    of_piece.rounding_stream = stream_of_tensor(tile.rounding_stream, piece.tensor);
    cpu.walks.update(of_piece, groups[piece.group]);
  });
}

}  // namespace ballast::kernels

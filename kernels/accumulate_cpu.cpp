#include "kernels/checks.h"
#include "kernels/cpu.h"
#include "kernels/pieces.h"
#include "kernels/random_math.h"
#include "kernels/summands.h"

namespace ballast::kernels {
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

}  // namespace ballast::kernels

// The results of encoded collectives, by definition: values are encoded and decoded one array at a time, and added in order.
#pragma once

#include "kernels/backend.h"
#include "kernels/random_math.h"
#include "tests/comm/rank_values.h"
#include "zero/comm/call.h"

namespace ballast::testing {

using kernels::CodeBits;

inline constexpr std::uint64_t wire_stream = 17;

inline kernels::CodeRounding rounding(std::uint64_t what, std::size_t rounder, std::size_t first) {
  return {true, kernels::rounding_stream(what, rounder, wire_stream), first};
}

// Encodes values and decodes them to fp32, or to another format.
inline Values decoded(const Values& values, CodeBits bits, const kernels::CodeRounding& how, DType into = DType::fp32) {
  const auto backend = kernels::cpu_backend({.threads = 1});
  std::vector<float> memory(kernels::quantized_bytes(values.view().count(), bits) / sizeof(float));
  const View blocks(reinterpret_cast<std::byte*>(memory.data()), memory.size() * sizeof(float), DType::u8);
  Values result(into, values.view().count());
  backend->quantize(values.view(), {bits, blocks}, how);
  backend->dequantize({bits, blocks}, result.view());
  return result;
}

// The elements of a rank from `first` on.
inline Values of_rank(std::size_t rank, DType dtype, std::size_t first, std::size_t count) {
  Values values(dtype, count);
  for (std::size_t i = 0; i < count; ++i) {
    values.set(i, value_of(rank, first + i));
  }
  return values;
}

// Adds the ranks of each host, whose values are decoded, and then the hosts, whose sums are decoded too. `number`: of the first
// element, on which random bits depend.
inline Values sum_of(const Summands& summands, DType dtype, std::size_t first, std::size_t count, std::size_t number,
                     const Encoding& encoding) {
  const auto add = [](Values& sum, const Values& values) {
    for (std::size_t i = 0; i < values.view().count(); ++i) {
      sum.set(i, sum.get(i) + values.get(i));
    }
  };
  Values sum(DType::fp32, count);
  for (std::size_t host = 0; host < summands.ranks / summands.ranks_per_host; ++host) {
    Values of_host(DType::fp32, count);
    for (std::size_t place = 0; place < summands.ranks_per_host; ++place) {
      const std::size_t rank = host * summands.ranks_per_host + place;
      add(summands.ranks_per_host == 1 ? sum : of_host,
          decoded(of_rank(rank, dtype, first, count), encoding.values, rounding(0, rank, number)));
    }
    if (summands.ranks_per_host > 1) add(sum, decoded(of_host, encoding.sums, rounding(1, host, number)));
  }
  return sum;
}

inline Values rounded(const Values& sum, DType into) {
  Values result(into, sum.view().count());
  for (std::size_t i = 0; i < sum.view().count(); ++i) {
    result.set(i, sum.get(i));
  }
  return result;
}

inline std::size_t blocks_up(std::size_t count) { return kernels::block_count(count) * group_size; }

inline Values gathered_codes(std::size_t ranks, DType dtype, std::size_t count, CodeBits bits) {
  Values all(dtype, ranks * count);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const Values exact = Values::of_rank(rank, dtype, count);
    all.put(rank * count, ranks == 1 ? exact : decoded(exact, bits, {}, dtype));
  }
  return all;
}

// The part of a rank, of `count` elements.
inline Values scattered_codes(const Summands& summands, DType dtype, std::size_t count, std::size_t rank, DType into,
                              const Encoding& encoding) {
  if (summands.ranks == 1) return summed_and_rounded(summands, dtype, 0, count, into);
  return rounded(sum_of(summands, dtype, rank * count, count, rank * blocks_up(count), encoding), into);
}

// Each rank adds a part, and encodes the sum for all ranks.
inline Values reduced_codes(const Summands& summands, DType dtype, std::size_t count, DType into,
                            const Encoding& encoding) {
  if (summands.ranks == 1) return summed_and_rounded(summands, dtype, 0, count, into);
  const std::size_t most = (kernels::block_count(count) + summands.ranks - 1) / summands.ranks * group_size;
  Values all(into, count);
  for (std::size_t rank = 0; rank < summands.ranks; ++rank) {
    const std::size_t first = std::min(rank * most, count);
    const std::size_t part = std::min(most, count - first);
    const Values sum = rounded(sum_of(summands, dtype, first, part, rank * most, encoding), into);
    all.put(first, decoded(sum, encoding.sums, rounding(2, rank, rank * most), into));
  }
  return all;
}

}  // namespace ballast::testing

// The CPU walks of into += scale * from, and of sums of arrays, for any width of lanes S.
#pragma once

#include "kernels/accumulate_math.h"
#include "kernels/number_walk.h"
#include "kernels/random_math.h"

namespace ballast::kernels {

template <class S, class From, class Into>
void accumulate_vectors(const typename From::Stored* from, float scale, typename Into::Stored* into,
                        std::size_t count) {
  using F = typename S::F;
  for (std::size_t i = 0; i < count; i += S::width) {
    const F sum = accumulated(load_number<S, Into>(into + i), load_number<S, From>(from + i), F(scale));
    store_number<S, Into>(into + i, sum);
  }
}

// `from` and `into` have the same count.
template <class S>
void accumulate_walk(const ConstNumbers& from, float scale, const Numbers& into) {
  with_format(from.dtype, [&]<class From>(From) {
    with_format(into.dtype, [&]<class Into>(Into) {
      const auto* source = elements<From>(from);
      auto* target = elements<Into>(into);
      const std::size_t rest = from.count % S::width;
      const std::size_t whole = from.count - rest;
      accumulate_vectors<S, From, Into>(source, scale, target, whole);
      if (rest > 0) {
        const Padded<S, typename From::Stored> last_source(source + whole, rest);
        Padded<S, typename Into::Stored> last_target(target + whole, rest);
        accumulate_vectors<S, From, Into>(last_source.at, scale, last_target.at, S::width);
        std::memcpy(target + whole, last_target.at, rest * sizeof(typename Into::Stored));
      }
    });
  });
}

// The sum of all arrays, whose elements from `first` on are added; `rest`: fewer of them than a vector holds.
template <class S, class From>
typename S::F sum_of_vectors(const Summands& from, typename S::F sum, std::size_t first, std::size_t rest = 0) {
  using F = typename S::F;
  for (std::size_t array = 0; array < from.arrays; ++array) {
    const auto* const at = reinterpret_cast<const typename From::Stored*>(from.data[array]) + first;
    const F added =
        rest == 0 ? load_number<S, From>(at) : load_number<S, From>(Padded<S, typename From::Stored>(at, rest).at);
    sum = accumulated(sum, added, F(1.0f));
  }
  return sum;
}

template <class S, class From, class Into>
void sum_arrays(const Summands& from, typename Into::Stored* into, Stores stores) {
  using F = typename S::F;
  const std::size_t rest = from.count % S::width;
  const std::size_t whole = from.count - rest;
  for (std::size_t i = 0; i < whole; i += S::width) {
    const F before = from.continues ? load_number<S, Into>(into + i) : F(0.0f);
    store_number<S, Into>(into + i, sum_of_vectors<S, From>(from, before, i), stores);
  }
  if (stores == Stores::streamed) S::finish_streams();
  if (rest > 0) {
    Padded<S, typename Into::Stored> last(into + whole, rest);
    const F before = from.continues ? load_number<S, Into>(last.at) : F(0.0f);
    store_number<S, Into>(last.at, sum_of_vectors<S, From>(from, before, whole, rest));
    std::memcpy(into + whole, last.at, rest * sizeof(typename Into::Stored));
  }
}

// `into` has the count of the arrays, and is fp32 if the sum continues.
template <class S>
void sum_walk(const Summands& from, const Numbers& into, Stores stores) {
  with_format(from.dtype, [&]<class From>(From) {
    with_format(into.dtype, [&]<class Into>(Into) {
      auto* const target = elements<Into>(into);
      sum_arrays<S, From, Into>(from, target, allowed<S, Into>(stores, target));
    });
  });
}

template <class S>
void accumulate_vectors_stochastic(const std::uint16_t* from, std::uint16_t* into, std::size_t count,
                                   std::uint64_t stream, std::uint64_t first_index) {
  using U = typename S::U;
  const RoundingKey key = rounding_key(stream, first_index);
  for (std::size_t i = 0; i < count; i += S::width) {
    const U index = S::lane_numbers() + U(static_cast<std::uint32_t>(first_index + i));
    S::store(into + i, accumulated_stochastic(load_number<S, Bf16Format>(into + i),
                                              load_number<S, Bf16Format>(from + i), random_bits(index, key)));
  }
}

// Both arrays are bf16 and have the same count. `first_index`: of the first element in its stream, a multiple of the group
// size, so that no group's indices differ in their upper halves.
template <class S>
void accumulate_stochastic_walk(const ConstNumbers& from, const Numbers& into, std::uint64_t stream,
                                std::uint64_t first_index) {
  const std::uint16_t* const source = elements<Bf16Format>(from);
  std::uint16_t* const target = elements<Bf16Format>(into);
  const std::size_t rest = from.count % S::width;
  const std::size_t whole = from.count - rest;
  for (std::size_t first = 0; first < whole; first += group_size) {
    const std::size_t count = whole - first < group_size ? whole - first : group_size;
    accumulate_vectors_stochastic<S>(source + first, target + first, count, stream, first_index + first);
  }
  if (rest > 0) {
    const Padded<S, std::uint16_t> last_source(source + whole, rest);
    Padded<S, std::uint16_t> last_target(target + whole, rest);
    accumulate_vectors_stochastic<S>(last_source.at, last_target.at, S::width, stream, first_index + whole);
    std::memcpy(target + whole, last_target.at, rest * sizeof(std::uint16_t));
  }
}

}  // namespace ballast::kernels

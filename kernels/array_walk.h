// The CPU walks of short kernels on arrays, for any width of lanes S.
#pragma once

#include "kernels/number_walk.h"
#include "kernels/random_math.h"
#include "kernels/state_math.h"

namespace ballast::kernels {

// --- Casts and copies ---

// A format whose bits are only moved: every pattern stays as it is, also that of a signalling NaN.
template <class Format>
struct Untouched {
  using Stored = typename Format::Stored;
  template <class U>
  static constexpr auto decode(U pattern) {
    return as_float(pattern);
  }
  template <class F>
  static constexpr BitsOf<F> encode(F x) {
    return bits(x);
  }
};

// `from` and `to` have the same count. Equal formats, u8 too, are copied.
template <class S>
void cast_walk(const ConstNumbers& from, const Numbers& to, Stores wanted) {
  if (from.dtype == DType::u8) {
    std::memcpy(to.data, from.data, from.count);
    return;
  }
  with_format(from.dtype, [&]<class From>(From) {
    with_format(to.dtype, [&]<class To>(To) {
      constexpr bool same = std::is_same_v<From, To>;
      using Source = std::conditional_t<same, Untouched<From>, From>;
      using Target = std::conditional_t<same, Untouched<To>, To>;
      auto* const target = elements<To>(to);
      const auto cast = [](auto* source, auto* at, std::size_t, std::size_t count, Stores stores) {
        for (std::size_t i = 0; i < count; i += S::width) {
          store_number<S, Target>(at + i, load_number<S, Source>(source + i), stores);
        }
      };
      walk_vectors<S>(elements<From>(from), target, from.count, allowed<S>(wanted, target), cast);
    });
  });
}

// --- Sums of squares: one double for each group of elements ---

// exact_sum_math.h adds these up. Squares of fp32 are exact in double, so a multiplication and an addition give the result of a
// fused one.
// Lane l adds up elements l, l + 8, l + 16, ... of the group. Then the lanes are added in halves (S::sum_of_lanes).
template <class S>
double sum_of_group(const float* group) {
  typename S::Doubles sum{};
  for (std::size_t i = 0; i < group_size; i += 8) {
    const auto x = S::load_doubles(group + i);
    sum = sum + x * x;
  }
  return S::sum_of_lanes(sum);
}

template <class S>
void sum_of_squares_walk(const ConstNumbers& values, double* sum_of_each_group) {
  with_format(values.dtype, [&]<class Format>(Format) {
    each_group<S>(elements<Format>(values), values.count, [&](const auto* from, std::size_t) {
      if constexpr (std::is_same_v<Format, Fp32Format>) {
        *sum_of_each_group++ = sum_of_group<S>(from);
      } else {
        alignas(64) float group[group_size];
        for (std::size_t i = 0; i < group_size; i += S::width) {
          S::store(group + i, load_number<S, Format>(from + i));
        }
        *sum_of_each_group++ = sum_of_group<S>(group);
      }
    });
  });
}

// --- The division of bf16 values by a norm ---

template <class S>
void divide_walk(const std::uint16_t* from, float divisor, std::uint16_t* to, std::size_t count) {
  const typename S::F by(divisor);
  walk_vectors<S>(from, to, count, Stores::cached,
                  [by](auto* source, auto* target, std::size_t, std::size_t n, Stores) {
                    for (std::size_t i = 0; i < n; i += S::width) {
                      store_number<S, Bf16Format>(target + i, load_number<S, Bf16Format>(source + i) / by);
                    }
                  });
}

// --- The first NaN or infinity ---

// Returns whether no value of a whole block has all exponent bits set. `count` is a multiple of the width.
template <class S, class Format>
bool all_finite(const typename Format::Stored* values, std::size_t count) {
  using U = typename S::U;
  U largest(0u);
  for (std::size_t i = 0; i < count; i += S::width) {
    largest = max(largest, load_pattern<S, Format>(values + i) & U(Format::infinity));
  }
  return S::max_of_lanes(largest) < Format::infinity;
}

template <class S, class Format>
std::size_t position_in_block(const typename Format::Stored* values, std::size_t count) {
  std::size_t i = 0;
  while (i < count && all_finite<S, Format>(Padded<S, typename Format::Stored>(values + i, 1).at, S::width)) {
    ++i;
  }
  return i;
}

// Returns the position of the first NaN or infinity, or the count if there is none.
template <class S>
std::size_t first_non_finite_walk(const ConstNumbers& values) {
  constexpr std::size_t block = 1024;
  return with_format(values.dtype, [&]<class Format>(Format) {
    const auto* from = elements<Format>(values);
    const std::size_t whole = values.count - values.count % S::width;
    for (std::size_t first = 0; first < whole; first += block) {
      const std::size_t count = whole - first < block ? whole - first : block;
      if (!all_finite<S, Format>(from + first, count)) {
        return first + position_in_block<S, Format>(from + first, count);
      }
    }
    return whole + position_in_block<S, Format>(from + whole, values.count - whole);
  });
}

// --- Sums of arrays ---

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

// `into` has the count of the arrays.
template <class S>
void sum_walk(const Summands& from, const Numbers& into, Stores stores) {
  with_format(from.dtype, [&]<class From>(From) {
    with_format(into.dtype, [&]<class Into>(Into) {
      auto* const target = elements<Into>(into);
      sum_arrays<S, From, Into>(from, target, allowed<S>(stores, target));
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
  const auto add = [&](const std::uint16_t* source, std::uint16_t* target, std::size_t at, std::size_t all, Stores) {
    for (std::size_t first = 0; first < all; first += group_size) {
      const std::size_t count = all - first < group_size ? all - first : group_size;
      accumulate_vectors_stochastic<S>(source + first, target + first, count, stream, first_index + at + first);
    }
  };
  walk_vectors<S>(elements<Bf16Format>(from), elements<Bf16Format>(into), from.count, Stores::cached, add);
}

}  // namespace ballast::kernels

// The CPU walks of short kernels, for any width of lanes S: fill, cast, squares, normalize, the first NaN or infinity.
#pragma once

#include "kernels/number_walk.h"
#include "kernels/state_math.h"

namespace ballast::kernels {

// The CPU walk that sets every element to one value, for any width of lanes S.
template <class S, class Format>
void fill_vectors(typename Format::Stored* to, std::size_t count, typename S::F value, Stores stores) {
  for (std::size_t i = 0; i < count; i += S::width) {
    store_number<S, Format>(to + i, value, stores);
  }
}

// `to` must not be u8.
template <class S>
void fill_walk(const Numbers& to, float value, Stores wanted) {
  with_format(to.dtype, [&]<class Format>(Format) {
    using F = typename S::F;
    auto* first = elements<Format>(to);
    const std::size_t rest = to.count % S::width;
    if (allowed<S, Format>(wanted, first) == Stores::streamed) {
      fill_vectors<S, Format>(first, to.count - rest, F(value), Stores::streamed);
      S::finish_streams();
    } else {
      fill_vectors<S, Format>(first, to.count - rest, F(value), Stores::cached);
    }
    if (rest > 0) {
      Padded<S, typename Format::Stored> target;
      fill_vectors<S, Format>(target.at, S::width, F(value), Stores::cached);
      std::memcpy(first + (to.count - rest), target.at, rest * sizeof(typename Format::Stored));
    }
  });
}

// The CPU walk of casts and copies, for any width of lanes S.
template <class S, class From, class To>
void cast_vectors(const typename From::Stored* from, typename To::Stored* to, std::size_t count, Stores stores) {
  for (std::size_t i = 0; i < count; i += S::width) {
    store_number<S, To>(to + i, load_number<S, From>(from + i), stores);
  }
}

template <class S, class From, class To>
void cast_numbers(const typename From::Stored* from, typename To::Stored* to, std::size_t count, Stores wanted) {
  const std::size_t rest = count % S::width;
  const std::size_t whole = count - rest;
  if (allowed<S, To>(wanted, to) == Stores::streamed) {
    cast_vectors<S, From, To>(from, to, whole, Stores::streamed);
    S::finish_streams();
  } else {
    cast_vectors<S, From, To>(from, to, whole, Stores::cached);
  }
  if (rest > 0) {
    const Padded<S, typename From::Stored> source(from + whole, rest);
    Padded<S, typename To::Stored> target;
    cast_vectors<S, From, To>(source.at, target.at, S::width, Stores::cached);
    std::memcpy(to + whole, target.at, rest * sizeof(typename To::Stored));
  }
}

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
void cast_walk(const ConstNumbers& from, const Numbers& to, Stores stores) {
  if (from.dtype == DType::u8) {
    std::memcpy(to.data, from.data, from.count);
    return;
  }
  with_format(from.dtype, [&]<class From>(From) {
    with_format(to.dtype, [&]<class To>(To) {
      constexpr bool same = std::is_same_v<From, To>;
      using Source = std::conditional_t<same, Untouched<From>, From>;
      using Target = std::conditional_t<same, Untouched<To>, To>;
      cast_numbers<S, Source, Target>(elements<From>(from), elements<To>(to), from.count, stores);
    });
  });
}

// The CPU walk of sums of squares, for any width of lanes S: one double for each group of elements. exact_sum_math.h
// adds these up. Squares of fp32 are exact in double, so a multiplication and an addition give the result of a fused
// one.
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

// The elements that a last, incomplete group lacks count as zeros.
template <class S>
void sum_of_squares_walk(const ConstNumbers& values, double* sum_of_each_group) {
  with_format(values.dtype, [&]<class Format>(Format) {
    const auto* from = elements<Format>(values);
    alignas(64) float group[group_size]{};
    const std::size_t rest = values.count % group_size;
    for (std::size_t first = 0; first < values.count - rest; first += group_size) {
      if constexpr (std::is_same_v<Format, Fp32Format>) {
        *sum_of_each_group++ = sum_of_group<S>(from + first);
      } else {
        for (std::size_t i = 0; i < group_size; i += S::width) {
          S::store(group + i, load_number<S, Format>(from + first + i));
        }
        *sum_of_each_group++ = sum_of_group<S>(group);
      }
    }
    if (rest > 0) {
      typename Format::Stored last[group_size]{};
      std::memcpy(last, from + (values.count - rest), rest * sizeof last[0]);
      for (std::size_t i = 0; i < group_size; i += S::width) {
        S::store(group + i, load_number<S, Format>(last + i));
      }
      *sum_of_each_group = sum_of_group<S>(group);
    }
  });
}

// The CPU walk that divides bf16 values by a norm, for any width of lanes S.
template <class S>
void divide_walk(const std::uint16_t* from, float divisor, std::uint16_t* to, std::size_t count) {
  const typename S::F by(divisor);
  const auto divide = [by](const std::uint16_t* source, std::uint16_t* target) {
    store_number<S, Bf16Format>(target, load_number<S, Bf16Format>(source) / by);
  };
  const std::size_t rest = count % S::width;
  for (std::size_t i = 0; i < count - rest; i += S::width) {
    divide(from + i, to + i);
  }
  if (rest > 0) {
    Padded<S, std::uint16_t> last(from + (count - rest), rest);
    divide(last.at, last.at);
    std::memcpy(to + (count - rest), last.at, rest * sizeof *to);
  }
}

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

}  // namespace ballast::kernels

// The CPU walk of casts and copies, for any width of lanes S.
#pragma once

#include "kernels/number_walk.h"

namespace ballast::kernels {

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

}  // namespace ballast::kernels

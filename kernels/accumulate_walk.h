// The CPU walks of into += scale * from, and of a sum's beginning, for any width of lanes S.
#pragma once

#include "kernels/accumulate_math.h"
#include "kernels/cast_walk.h"

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

// A format whose values are added to zero before they are stored.
template <class Format>
struct AddedToZero {
  using Stored = typename Format::Stored;
  template <class F>
  static constexpr BitsOf<F> encode(F x) {
    return Format::encode(begun(x));
  }
};

// `from` and `into` have the same count.
template <class S>
void begin_sum_walk(const ConstNumbers& from, const Numbers& into, Stores stores) {
  with_format(from.dtype, [&]<class From>(From) {
    with_format(into.dtype, [&]<class Into>(Into) {
      cast_numbers<S, From, AddedToZero<Into>>(elements<From>(from), elements<Into>(into), from.count, stores);
    });
  });
}

}  // namespace ballast::kernels

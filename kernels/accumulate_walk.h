// The CPU walks of into += scale * from, and of sums of many arrays, and of a sum's beginning, for any width of lanes S.
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

template <class S, class From>
void sum_arrays(const Summands& from, float* into, Stores stores) {
  using F = typename S::F;
  const std::size_t rest = from.count % S::width;
  const std::size_t whole = from.count - rest;
  for (std::size_t i = 0; i < whole; i += S::width) {
    const F before = from.continues ? load_number<S, Fp32Format>(into + i) : F(0.0f);
    store_number<S, Fp32Format>(into + i, sum_of_vectors<S, From>(from, before, i), stores);
  }
  if (stores == Stores::streamed) S::finish_streams();
  if (rest > 0) {
    Padded<S, float> last(into + whole, rest);
    const F before = from.continues ? load_number<S, Fp32Format>(last.at) : F(0.0f);
    store_number<S, Fp32Format>(last.at, sum_of_vectors<S, From>(from, before, whole, rest));
    std::memcpy(into + whole, last.at, rest * sizeof(float));
  }
}

// `into` is fp32, and has the count of the arrays.
template <class S>
void sum_walk(const Summands& from, const Numbers& into, Stores stores) {
  float* const target = elements<Fp32Format>(into);
  with_format(from.dtype,
              [&]<class From>(From) { sum_arrays<S, From>(from, target, allowed<S, Fp32Format>(stores, target)); });
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

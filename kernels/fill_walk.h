// The CPU walk that sets every element to one value, for any width of lanes S.
#pragma once

#include "kernels/number_walk.h"

namespace ballast::kernels {

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

}  // namespace ballast::kernels

// The common parts of CPU walks: loading and storing lanes in any format, and the elements after the last whole vector.
// Everything here depends on the lanes S, so that no two instruction sets share a function.
#pragma once

#include <cstring>

#include "kernels/number_format.h"
#include "kernels/numbers.h"

namespace ballast::kernels {

template <class S, class Format>
typename S::U load_pattern(const typename Format::Stored* from) {
  if constexpr (std::is_same_v<typename Format::Stored, float>) {
    return bits(S::load(from));
  } else {
    return S::load(from);
  }
}

template <class S, class Format>
typename S::F load_number(const typename Format::Stored* from) {
  return Format::decode(load_pattern<S, Format>(from));
}

template <class S, class Format>
void store_number(typename Format::Stored* to, typename S::F x, Stores stores = Stores::cached) {
  const auto write = [to, stores](auto lanes) {
    if (stores == Stores::streamed) {
      S::stream(to, lanes);
    } else {
      S::store(to, lanes);
    }
  };
  if constexpr (std::is_same_v<typename Format::Stored, float>) {
    write(as_float(Format::encode(x)));
  } else {
    write(Format::encode(x));
  }
}

// Streaming needs addresses that are multiples of the bytes that one store writes.
template <class S, class Format>
Stores allowed(Stores wanted, const typename Format::Stored* to) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(to) % (S::width * sizeof(typename Format::Stored)) == 0;
  return aligned ? wanted : Stores::cached;
}

// A vector of which memory holds only the first elements; the others are zeros.
template <class S, class Stored>
struct Padded {
  alignas(64) Stored at[S::width]{};
  Padded() = default;
  Padded(const Stored* from, std::size_t count) { std::memcpy(at, from, count * sizeof(Stored)); }
};

template <class Format>
const typename Format::Stored* elements(const ConstNumbers& numbers) {
  return reinterpret_cast<const typename Format::Stored*>(numbers.data);
}
template <class Format>
typename Format::Stored* elements(const Numbers& numbers) {
  return reinterpret_cast<typename Format::Stored*>(numbers.data);
}

}  // namespace ballast::kernels

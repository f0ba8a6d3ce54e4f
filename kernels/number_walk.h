// The common parts of CPU walks: loading and storing lanes in any format, and the elements after the last whole vector.
// Everything here depends on the lanes S, so that no two instruction sets share a function.
#pragma once

#include <ballast/state_format.h>

#include <cstring>

#include "kernels/number_math.h"
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

// Calls walk(from, to, first, count, stores) with whole vectors: of the arrays, and then of their last elements, padded to one
// vector. `first` is the position of the elements.
template <class S, class From, class To, class Walk>
void walk_vectors(const From* from, To* to, std::size_t count, Stores stores, const Walk& walk) {
  const std::size_t rest = count % S::width;
  const std::size_t whole = count - rest;
  walk(from, to, std::size_t{0}, whole, stores);
  if (stores == Stores::streamed) S::finish_streams();
  if (rest > 0) {
    const Padded<S, From> last_from(from + whole, rest);
    Padded<S, To> last_to(to + whole, rest);
    walk(last_from.at, last_to.at, whole, S::width, Stores::cached);
    std::memcpy(to + whole, last_to.at, rest * sizeof(To));
  }
}

// Calls walk(group, first) for each group of elements, of which `first` is the position. The elements that a last, incomplete
// group lacks are zeros.
template <class S, class Stored, class Walk>
void each_group(const Stored* from, std::size_t count, const Walk& walk) {
  const std::size_t rest = count % group_size;
  for (std::size_t first = 0; first < count - rest; first += group_size) {
    walk(from + first, first);
  }
  if (rest > 0) {
    alignas(64) Stored last[group_size]{};
    std::memcpy(last, from + (count - rest), rest * sizeof last[0]);
    walk(static_cast<const Stored*>(last), count - rest);
  }
}

// Arrays of 8-bit and 4-bit codes, as lanes S access them.
template <class S, int bits>
class CodeArray {
  using U = typename S::U;
  static_assert(bits == 8 || bits == 4);

 public:
  explicit CodeArray(std::uint8_t* bytes) : bytes_(bytes) {}

  // `i` is a multiple of the number of lanes. Storing takes the low bits of each lane.
  U load(std::size_t i) const {
    if constexpr (bits == 8) {
      return S::load(bytes_ + i);
    } else {
      return S::load_nibbles(bytes_, i);
    }
  }
  void store(std::size_t i, U codes) const {
    if constexpr (bits == 8) {
      S::store(bytes_ + i, codes);
    } else {
      S::store_nibbles(bytes_, i, codes);
    }
  }

 private:
  std::uint8_t* bytes_;
};

}  // namespace ballast::kernels

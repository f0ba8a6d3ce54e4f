// The common parts of CPU walks: loading and storing lanes in any format, and the elements after the last whole vector.
// Everything here depends on the lanes S, so that no two instruction sets share a function.
#pragma once

#include <ballast/state_format.h>

#include <array>
#include <cstring>

#include "kernels/number_math.h"
#include "kernels/numbers.h"
#include "kernels/random_math.h"

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

template <class S, class T>
auto load_two(const T* from) -> Two<decltype(S::load(from))> {
  return {S::load(from), S::load(from + S::width)};
}

template <class S, class T, class Lanes>
void store_two(T* to, const Two<Lanes>& x) {
  S::store(to, x.a);
  S::store(to + S::width, x.b);
}

// Two vectors, in pairs or in the order of memory.
template <class S, class Format, bool in_pairs>
Two<typename S::F> load_two_numbers(const typename Format::Stored* from) {
  using U = typename S::U;
  if constexpr (!in_pairs) {
    return {load_number<S, Format>(from), load_number<S, Format>(from + S::width)};
  } else if constexpr (std::is_same_v<Format, Fp32Format>) {
    return S::load_pairs(from);
  } else if constexpr (std::is_same_v<Format, Bf16Format>) {
    const U pairs = S::load_pairs(from);
    return {as_float(shift_left<16>(pairs)), as_float(pairs & U(0xffff0000u))};
  } else {
    const U pairs = S::load_pairs(from);
    return {Format::decode(pairs & U(0xffffu)), Format::decode(shift_right<16>(pairs))};
  }
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

// Stores pairs in the order of memory.
template <class S, class Format>
void store_two_numbers(typename Format::Stored* to, const Two<typename S::F>& pairs, Stores stores) {
  if constexpr (std::is_same_v<Format, Fp32Format>) {
    const auto ordered = S::in_order(pairs);
    store_number<S, Format>(to, ordered.a, stores);
    store_number<S, Format>(to + S::width, ordered.b, stores);
  } else {
    const auto halves = lower_halves<typename S::U>({Format::encode(pairs.a), Format::encode(pairs.b)});
    stores == Stores::streamed ? S::stream_pairs(to, halves) : S::store_pairs(to, halves);
  }
}

// Streaming needs addresses that are multiples of a vector.
template <class S>
Stores allowed(Stores wanted, const void* to) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(to) % (S::width * sizeof(float)) == 0;
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

// Draws the random bits of a group, in pairs. `index` is that of its first element, a multiple of the group size. The first product of an index is a sum: the product of the element's place in two
// vectors, that of the place of these vectors in their group, and that of the rest, which the group shares.
template <class S>
void draw_random_bits(std::uint64_t stream, std::uint64_t index, std::uint32_t* to) {
  using U = typename S::U;
  constexpr std::uint32_t places = 2 * S::width;
  static constexpr auto products = [] {
    std::array<std::uint32_t, group_size / places> made{};
    for (std::uint32_t i = 0; i < made.size(); ++i)
      made[i] = i * places * first_multiplier;
    return made;
  }();
  const RoundingKey key = rounding_key(stream, index);
  const std::uint32_t mixed = key.first ^ static_cast<std::uint32_t>(index);
  constexpr std::uint32_t in_group = group_size;
  const U place = shift_left<1>(S::lane_numbers()) ^ U(mixed % places);
  const U rest(mixed / in_group * in_group * first_multiplier);
  const Two<U> product{place * U(first_multiplier) + rest, (place ^ U(1u)) * U(first_multiplier) + rest};
  for (std::uint32_t i = 0; i < group_size; i += places) {
    const U of_vectors(products[(mixed % in_group ^ i) / places]);
    store_two<S>(to + i, Two<U>{random_bits_of_product(product.a + of_vectors, key),
                                random_bits_of_product(product.b + of_vectors, key)});
  }
}

// Arrays of 8-bit and 4-bit codes, as lanes S access them: in pairs, of which a lane holds two in its halves, or in its low byte.
template <class S, int bits>
class CodeArray {
  using U = typename S::U;
  static_assert(bits == 8 || bits == 4);

 public:
  explicit CodeArray(std::uint8_t* bytes) : bytes_(bytes) {}

  // `i` is a multiple of the elements of two vectors, or of four where that many are stored.
  U load(std::size_t i) const {
    if constexpr (bits == 8) return S::load_pairs(bytes_ + i);
    return S::load(bytes_ + i / 2);
  }
  void store(std::size_t i, U first, U second) const {
    if constexpr (bits == 8) {
      S::store_half_bytes(bytes_ + i, first, second);
    } else {
      S::store_lane_bytes(bytes_ + i / 2, first, second);
    }
  }

 private:
  std::uint8_t* bytes_;
};

}  // namespace ballast::kernels

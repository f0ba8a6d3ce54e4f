// Arrays of 8-bit and 4-bit codes, as lanes S access them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::kernels {

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

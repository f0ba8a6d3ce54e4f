#include "kernels/octet.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <vector>

using namespace ballast::kernels;

namespace {

template <class T>
struct Array {
  Array() : memory(64) {
    for (std::size_t i = 0; i < memory.size(); ++i) {
      memory[i] = static_cast<T>(0x9e3779b9u * (i + 1));
    }
  }
  std::byte* bytes() { return reinterpret_cast<std::byte*>(memory.data()); }
  std::vector<T> memory;
};

}  // namespace

TEMPLATE_TEST_CASE("an octet is read and written the same way whole and element by element", "", std::uint8_t,
                   std::uint16_t, std::uint32_t) {
  Array<TestType> array;
  const OctetPlace place{.first = 16, .count = 8, .whole = true};
  const Octet whole = load_octet<TestType, true>(array.bytes(), place);
  const Octet single = load_octet<TestType, false>(array.bytes(), place);
  for (std::size_t i = 0; i < octet_size; ++i) {
    CHECK(whole.at[i] == array.memory[16 + i]);
    CHECK(single.at[i] == array.memory[16 + i]);
  }

  Octet wide{};  // the high bits are not stored
  for (std::size_t i = 0; i < octet_size; ++i) {
    wide.at[i] = static_cast<std::uint32_t>(0xf1e2d3c4u + 0x01010101u * i);
  }
  Array<TestType> by_octet;
  Array<TestType> by_element;
  store_octet<TestType, true>(by_octet.bytes(), place, wide);
  store_octet<TestType, false>(by_element.bytes(), place, wide);
  CHECK(by_octet.memory == by_element.memory);
  for (std::size_t i = 0; i < octet_size; ++i) {
    CHECK(by_octet.memory[16 + i] == static_cast<TestType>(wide.at[i]));
  }
}

TEST_CASE("an octet of 4-bit codes has the first of two in the lower half of a byte") {
  Array<std::uint8_t> array;
  const OctetPlace whole{.first = 16, .count = 8, .whole = true};
  const Octet codes = load_octet<Nibble, true>(array.bytes(), whole);
  for (std::size_t i = 0; i < octet_size; ++i) {
    CHECK(codes.at[i] == (array.memory[8 + i / 2] >> (i % 2 == 0 ? 0 : 4) & 15));
  }
  for (unsigned count = 0; count <= octet_size; ++count) {
    const OctetPlace place{.first = 16, .count = count, .whole = false};
    const Octet some = load_octet<Nibble, false>(array.bytes(), place);
    Array<std::uint8_t> written;
    Octet wide = some;
    for (std::uint32_t& code : wide.at) {
      code |= 0xabcdef50u;  // the high bits are not stored
    }
    store_octet<Nibble, false>(written.bytes(), place, wide);
    for (std::size_t i = 0; i < octet_size; ++i) {
      CHECK(some.at[i] == (i < count ? codes.at[i] : 0));
    }
    for (std::size_t i = 0; i < written.memory.size(); ++i) {
      const bool is_half = i == 8 + count / 2 && count % 2 == 1;  // the unused half becomes zero
      CHECK(written.memory[i] == (is_half ? array.memory[i] & 15 : array.memory[i]));
    }
    if (count == octet_size) {
      store_octet<Nibble, true>(written.bytes(), whole, wide);
      CHECK(written.memory == array.memory);
    }
  }
}

TEMPLATE_TEST_CASE("an incomplete octet touches only its elements", "", std::uint8_t, std::uint16_t, std::uint32_t) {
  for (unsigned count = 0; count < octet_size; ++count) {
    Array<TestType> array;
    const Array<TestType> before;
    const OctetPlace place{.first = 3, .count = count, .whole = false};
    Octet octet = load_octet<TestType, false>(array.bytes(), place);
    for (std::size_t i = 0; i < octet_size; ++i) {
      CHECK(octet.at[i] == (i < count ? before.memory[3 + i] : TestType{0}));
      octet.at[i] = ~octet.at[i];
    }
    store_octet<TestType, false>(array.bytes(), place, octet);
    for (std::size_t i = 0; i < array.memory.size(); ++i) {
      const bool inside = i >= 3 && i < 3 + count;
      CHECK((array.memory[i] != before.memory[i]) == inside);
    }
  }
}

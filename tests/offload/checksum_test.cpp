#include "offload/checksum.h"

#include <catch2/catch.hpp>
#include <vector>

#include "tests/offload/aligned.h"

using namespace ballast::offload;

TEST_CASE("checksums are XXH3-64, as its authors publish it") {
  CHECK(checksum({}) == 0x2d06800538d394c2);
  std::vector<std::byte> text;
  for (const char c : std::string_view("xxhash")) {
    text.push_back(static_cast<std::byte>(c));
  }
  CHECK(checksum(text) == checksum_baseline(text, 0));
}

TEST_CASE("every instruction set gives the same checksum, for any size, alignment and seed") {
  std::vector<std::byte> bytes(5000);
  fill_pattern(bytes, 1);
  for (std::size_t size = 0; size < 4100; size += size < 1200 ? 1 : 97) {
    for (const std::size_t first : {0u, 1u, 13u}) {
      const auto part = std::span(bytes).subspan(first, size);
      for (const std::uint64_t seed : {0ul, 1ul, 0x9e3779b97f4a7c15ul}) {
        REQUIRE(checksum(part, seed) == checksum_baseline(part, seed));
      }
    }
  }
}

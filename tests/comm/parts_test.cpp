// Tests of the comparison of parts that pass from one rank to another.
#include "zero/comm/transport.h"

#include <catch2/catch.hpp>

using namespace ballast;

TEST_CASE("parts differ if the size of one of them does") {
  const std::byte bytes[16]{};
  const auto sizes = [&](std::initializer_list<std::size_t> counts) {
    std::vector<ConstView> views;
    for (const std::size_t count : counts)
      views.emplace_back(bytes, count, DType::u8);
    return sizes_of(views);
  };
  CHECK_NOTHROW(require_same_parts(sizes({1, 2}), sizes({1, 2}), 7));
  for (const auto& other : {sizes({2, 1}), sizes({3}), sizes({0, 1, 2}), sizes({1, 2, 0}), sizes({})}) {
    CHECK_THROWS_WITH(require_same_parts(sizes({1, 2}), other, 7),
                      Catch::Contains("B1003 rank 7 sends parts of other"));
  }
}

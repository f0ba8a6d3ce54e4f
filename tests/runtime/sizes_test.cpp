#include <ballast/error.h>

#include "kernels/runtime/sizes.h"

#include <catch2/catch.hpp>

using namespace ballast;

TEST_CASE("sizes are written with four digits at most") {
  CHECK(human_bytes(0) == "0 B");
  CHECK(human_bytes(1) == "1 B");
  CHECK(human_bytes(1023) == "1023 B");
  CHECK(human_bytes(1024) == "1 KiB");
  CHECK(human_bytes(1536) == "1.5 KiB");
  CHECK(human_bytes(std::size_t{3} << 29) == "1.5 GiB");
  CHECK(human_bytes((std::size_t{1} << 20) - 1) == "1 MiB");  // 1024 KiB would be wrong
  CHECK(human_bytes((std::size_t{1} << 30) - (std::size_t{1} << 20)) == "1023 MiB");
  CHECK(human_bytes(std::size_t{13} << 40) == "13 TiB");
  CHECK(human_bytes(SIZE_MAX) == "16 EiB");
}

TEST_CASE("sizes are parsed as users write them") {
  CHECK(parse_bytes("0") == 0);
  CHECK(parse_bytes("4096") == 4096);
  CHECK(parse_bytes("512MiB") == std::size_t{512} << 20);
  CHECK(parse_bytes(" 40 gib ") == std::size_t{40} << 30);
  CHECK(parse_bytes("1.5GiB") == std::size_t{3} << 29);
  CHECK(parse_bytes("40GB") == 40'000'000'000);
  CHECK(parse_bytes("1e9") == 1'000'000'000);
  CHECK(parse_bytes("2KB") == 2000);
  CHECK(parse_bytes("7 B") == 7);
  CHECK(parse_bytes("9007199254740993") == 9007199254740993);  // a double cannot hold this number
}

TEST_CASE("a size is parsed as it was written") {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1000}, std::size_t{5} << 20, std::size_t{7} << 41}) {
    CHECK(parse_bytes(human_bytes(bytes)) == bytes);
  }
}

TEST_CASE("an unclear size is refused with an example") {
  for (const char* text : {"", " ", "GiB", "-1", "-1GiB", "nan", "inf", "1e30", "20EiB", "40G", "5 Gbit", "1,5GiB",
                           "0x10", "0.5", "16777216TiB"}) {
    INFO(text);
    CHECK_THROWS_WITH(parse_bytes(text), Catch::Contains("512MiB"));
    CHECK_THROWS_AS(parse_bytes(text), UsageError);
  }
}

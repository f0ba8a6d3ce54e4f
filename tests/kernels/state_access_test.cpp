#include "kernels/state_access.h"

#include <catch2/catch.hpp>

#include "tests/kernels/update_memory.h"

using namespace ballast;
using namespace ballast::kernels;
using Catch::Contains;

namespace {

constexpr std::size_t count = 300;  // two groups and a part of one

// What a rounded number may be off by: of its size, and of the largest in its group.
struct Rounding {
  float relative;
  float absolute;
};

Rounding rounding_of(StateFormat format, Moment moment) {
  if (format == StateFormat::bf16) return {0x1p-8f, 0.0f};
  if (format != StateFormat::compact) return {0.0f, 0.0f};
  return moment == Moment::momentum ? Rounding{0x1p-5f, 0x1p-11f} : Rounding{0x1p-5f, 0x1p-11f};
}

std::vector<float> some_moments(Moment moment) {
  std::vector<float> numbers(count);
  for (std::size_t i = 0; i < count; ++i) {
    numbers[i] = std::ldexp(1.0f + static_cast<float>(i % 7) / 7.0f, -static_cast<int>(i % 5));
    if (moment == Moment::momentum && i % 3 == 0) numbers[i] = -numbers[i];
  }
  return numbers;
}

}  // namespace

TEST_CASE("moments that are written to a tile are read again, as exactly as the format keeps them") {
  for (const StateFormat format : all_state_formats) {
    for (const Moment moment : {Moment::momentum, Moment::variance}) {
      INFO(name(format) << (moment == Moment::momentum ? ", first moment" : ", second moment"));
      UpdateMemory memory({.format = format, .count = count});
      const std::vector<float> numbers = some_moments(moment);
      write_moment(memory.tile(), moment, numbers);
      std::vector<float> read(count);
      read_moment(memory.tile(), moment, read);
      const Rounding allowed = rounding_of(format, moment);
      for (std::size_t i = 0; i < count; ++i) {
        CHECK(std::abs(read[i] - numbers[i]) <= std::abs(numbers[i]) * allowed.relative + 2.0f * allowed.absolute);
      }
    }
  }
}

TEST_CASE("a moment does not touch what lies beside it") {
  UpdateMemory memory({.format = StateFormat::compact, .count = count});
  std::vector<float> variance(count), again(count);
  read_moment(memory.tile(), Moment::variance, variance);
  write_moment(memory.tile(), Moment::momentum, some_moments(Moment::momentum));
  read_moment(memory.tile(), Moment::variance, again);
  CHECK(variance == again);
}

TEST_CASE("a master that begins anew is the parameter") {
  const auto backend = cpu_backend({.threads = 1});
  for (const StateFormat format : all_state_formats) {
    INFO(name(format));
    UpdateMemory memory({.format = format, .count = count});
    const UpdateTile tile = memory.tile();
    begin_master(tile, *backend);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t parameter = reinterpret_cast<const std::uint16_t*>(tile.parameter)[i];
      const std::uint32_t low = reinterpret_cast<const std::uint16_t*>(tile.master)[i];
      float master = 0.0f;
      switch (format) {
        case StateFormat::fp32: master = reinterpret_cast<const float*>(tile.master)[i]; break;
        case StateFormat::compact:
          master = join8(parameter << 16, static_cast<std::uint32_t>(static_cast<std::int8_t>(tile.master[i])));
          break;
        default: master = join16((parameter << 16) | low);
      }
      CHECK(bits(master) == parameter << 16);
    }
  }
}

TEST_CASE("a moment that is not kept is refused, and so is memory of another size") {
  UpdateMemory memory({.format = StateFormat::split, .count = count});
  UpdateTile tile = memory.tile();
  tile.variance = nullptr;
  std::vector<float> numbers(count);
  CHECK_THROWS_WITH(read_moment(tile, Moment::variance, numbers), Contains("B1001") && Contains("second moment"));
  CHECK_THROWS_WITH(write_moment(tile, Moment::momentum, std::span(numbers).first(10)), Contains("300 elements"));
}

#include "kernels/state_access.h"

#include <catch2/catch.hpp>

#include "tests/kernels/update_memory.h"

using namespace ballast;
using namespace ballast::kernels;
using Catch::Contains;

namespace {

constexpr std::size_t count = 300;  // two groups and a part of one

// The allowed error of a rounded value: relative to its size, and relative to the largest value of its group.
struct Rounding {
  float relative;
  float absolute;
};

Rounding rounding_of(StateFormat format, Moment moment) {
  if (format == StateFormat::bf16) return {0x1p-8f, 0.0f};
  if (format == StateFormat::compact) return {0x1p-5f, 0x1p-11f};
  if (format == StateFormat::four_bit) {  // half of a step: of a power of two, or of half of one and squared
    return moment == Moment::momentum ? Rounding{0.5f, 0x1p-8f} : Rounding{0.57f, 0.0f};
  }
  return {0.0f, 0.0f};
}

std::vector<float> some_moments(Moment moment) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = std::ldexp(1.0f + static_cast<float>(i % 7) / 7.0f, -static_cast<int>(i % 5));
    if (moment == Moment::momentum && i % 3 == 0) values[i] = -values[i];
  }
  return values;
}

}  // namespace

TEST_CASE("moments are read from a tile as exactly as its format stores them") {
  for (const StateFormat format : all_state_formats) {
    for (const Moment moment : {Moment::momentum, Moment::variance}) {
      INFO(name(format) << (moment == Moment::momentum ? ", first moment" : ", second moment"));
      UpdateMemory memory({.format = format, .count = count});
      const std::vector<float> values = some_moments(moment);
      write_moment(memory.tile(), moment, values);
      std::vector<float> read(count);
      read_moment(memory.tile(), moment, read);
      const Rounding allowed = rounding_of(format, moment);
      for (std::size_t i = 0; i < count; ++i) {
        CHECK(std::abs(read[i] - values[i]) <= std::abs(values[i]) * allowed.relative + 2.0f * allowed.absolute);
      }
    }
  }
}

TEST_CASE("a moment that is not a number stays one in every format") {
  for (const StateFormat format : all_state_formats) {
    for (const Moment moment : {Moment::momentum, Moment::variance}) {
      INFO(name(format));
      UpdateMemory memory({.format = format, .count = count});
      std::vector<float> values = some_moments(moment);
      values[3] = std::nanf("");
      write_moment(memory.tile(), moment, values);
      read_moment(memory.tile(), moment, values);
      CHECK(std::isnan(values[3]));
    }
  }
}

TEST_CASE("writing a moment does not touch the memory around it") {
  UpdateMemory memory({.format = StateFormat::compact, .count = count});
  std::vector<float> variance(count), again(count);
  read_moment(memory.tile(), Moment::variance, variance);
  write_moment(memory.tile(), Moment::momentum, some_moments(Moment::momentum));
  read_moment(memory.tile(), Moment::variance, again);
  CHECK(variance == again);
}

TEST_CASE("a new master equals the parameter") {
  const auto backend = cpu_backend({.threads = 1});
  for (const StateFormat format : all_state_formats) {
    INFO(name(format));
    UpdateMemory memory({.format = format, .count = count});
    const TileMemory tile = memory.tile();
    begin_master(tile, *backend);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t parameter = reinterpret_cast<const std::uint16_t*>(tile.parameter)[i];
      const std::uint32_t low = reinterpret_cast<const std::uint16_t*>(tile.master)[i];
      float master = 0.0f;
      switch (format) {
        case StateFormat::fp32: master = reinterpret_cast<const float*>(tile.master)[i]; break;
        case StateFormat::compact:
        case StateFormat::four_bit:
          master = join8(parameter << 16, static_cast<std::uint32_t>(static_cast<std::int8_t>(tile.master[i])));
          break;
        default: master = join16((parameter << 16) | low);
      }
      CHECK(bits(master) == parameter << 16);
    }
  }
}

TEST_CASE("a moment that the tile does not store is refused, and so is memory of another size") {
  UpdateMemory memory({.format = StateFormat::split, .count = count});
  TileMemory tile = memory.tile();
  tile.variance = nullptr;
  std::vector<float> values(count);
  CHECK_THROWS_WITH(read_moment(tile, Moment::variance, values), Contains("B1001") && Contains("second moment"));
  CHECK_THROWS_WITH(write_moment(tile, Moment::momentum, std::span(values).first(10)), Contains("300 elements"));
}

namespace {

// A tile's state as plain values: the parameter's bits and the moments.
struct PlainState {
  std::vector<std::byte> parameter;
  std::vector<float> momentum = std::vector<float>(count);
  std::vector<float> variance = std::vector<float>(count);
  bool operator==(const PlainState&) const = default;
};

PlainState plain_state_of(const TileMemory& tile) {
  PlainState state{{tile.parameter, tile.parameter + count * byte_size(tile.parameter_dtype)}};
  read_moment(tile, Moment::momentum, state.momentum);
  read_moment(tile, Moment::variance, state.variance);
  return state;
}

// Returns the stored bytes of the parameter and of all state.
std::vector<std::byte> bytes_of(const TileMemory& tile) {
  std::vector<std::byte> bytes(tile.parameter, tile.parameter + count * byte_size(tile.parameter_dtype));
  const auto add = [&](const void* begin, std::size_t size) {
    const auto* const from = static_cast<const std::byte*>(begin);
    if (from != nullptr) bytes.insert(bytes.end(), from, from + size);
  };
  add(tile.master, count * master_bytes(tile.format));
  add(tile.momentum, moment_bytes(tile.format, count));
  add(tile.variance, moment_bytes(tile.format, count));
  add(tile.momentum_scales, 3 * sizeof(float));
  add(tile.variance_scales, 3 * sizeof(float));
  return bytes;
}

}  // namespace

TEST_CASE("state that is copied to the same format has the same bits") {
  for (const StateFormat format : all_state_formats) {
    for (const UpdateShape& shape : sample_shapes(format)) {
      INFO(name(format) << ", parameter " << name(shape.parameter_dtype));
      UpdateShape counted = shape;
      counted.count = count;
      UpdateMemory one(counted, 1), other(counted, 2);
      REQUIRE(bytes_of(one.tile()) != bytes_of(other.tile()));
      copy_state(one.tile(), other.tile());
      CHECK(bytes_of(one.tile()) == bytes_of(other.tile()));
    }
  }
}

TEST_CASE("a parameter that is copied leaves the moments as they are") {
  for (const StateFormat format : all_state_formats) {
    INFO(name(format));
    UpdateMemory exact({.format = StateFormat::fp32, .count = count}, 1), other({.format = format, .count = count}, 2),
        whole({.format = format, .count = count}, 2);
    const PlainState before = plain_state_of(other.tile());
    copy_parameter(exact.tile(), other.tile());
    const PlainState after = plain_state_of(other.tile());
    copy_state(exact.tile(), whole.tile());
    CHECK(after.parameter == plain_state_of(whole.tile()).parameter);
    CHECK(after.parameter != before.parameter);
    CHECK(after.momentum == before.momentum);
    CHECK(after.variance == before.variance);
  }
}

TEST_CASE("state that is copied to an exact format and back has the same bits") {
  for (const StateFormat format : {StateFormat::split, StateFormat::bf16}) {
    INFO(name(format));
    const UpdateShape exact{.format = StateFormat::fp32, .count = count};
    UpdateMemory one({.format = format, .count = count}, 1), there(exact, 2),
        back({.format = format, .count = count}, 3);
    copy_state(one.tile(), there.tile());
    CHECK(plain_state_of(one.tile()) == plain_state_of(there.tile()));
    copy_state(there.tile(), back.tile());
    CHECK(bytes_of(one.tile()) == bytes_of(back.tile()));
  }
}

TEST_CASE("a master survives every format of the same width, and parameters survive all formats") {
  for (const StateFormat from : all_state_formats) {
    for (const StateFormat to : all_state_formats) {
      INFO(name(from) << " to " << name(to));
      const UpdateShape fp32{.format = StateFormat::fp32, .count = count};
      UpdateMemory made({.format = StateFormat::split, .count = count}, 1), one({.format = from, .count = count}, 2);
      UpdateMemory exact(fp32, 3), other({.format = to, .count = count}, 4), once_more(fp32, 5);
      copy_state(made.tile(), one.tile());  // a parameter that is its rounded master
      copy_state(one.tile(), exact.tile());
      copy_state(exact.tile(), other.tile());
      CHECK(plain_state_of(one.tile()).parameter == plain_state_of(other.tile()).parameter);
      copy_state(other.tile(), once_more.tile());
      for (std::size_t i = 0; i < count; ++i) {
        const float before = reinterpret_cast<const float*>(exact.tile().master)[i];
        const float after = reinterpret_cast<const float*>(once_more.tile().master)[i];
        CHECK(std::abs(after - before) <=
              (master_bytes(to) == 1 ? std::max(std::abs(before), 0x1p-126f) * 0x1p-15f : 0.0f));
      }
    }
  }
}

TEST_CASE("a frozen parameter has no state, and starts with zero moments when it is trained") {
  for (const StateFormat format : all_state_formats) {
    INFO(name(format));
    UpdateMemory made({.format = StateFormat::split, .count = count}, 1), memory({.format = format, .count = count}, 2);
    const TileMemory trained = memory.tile();
    copy_state(made.tile(), trained);  // a parameter that is its rounded master
    std::vector<std::uint16_t> parameter(count), frozen(count);
    std::memcpy(parameter.data(), trained.parameter, 2 * count);
    const TileMemory alone{
        .parameter_dtype = DType::bf16, .parameter = reinterpret_cast<std::byte*>(frozen.data()), .count = count};
    copy_state(trained, alone);
    CHECK(frozen == parameter);
    copy_state(alone, trained);
    CHECK(std::memcmp(trained.parameter, parameter.data(), 2 * count) == 0);
    const auto backend = cpu_backend({.threads = 1});
    const std::vector<std::byte> copied = bytes_of(trained);
    begin_master(trained, *backend);
    CHECK(copied == bytes_of(trained));
    CHECK(plain_state_of(trained).momentum == std::vector<float>(count));
    CHECK(plain_state_of(trained).variance == std::vector<float>(count));
  }
}

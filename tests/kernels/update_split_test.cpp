// Tests that format split gives the bits of format fp32, for every pattern and over many steps.
#include <atomic>
#include <catch2/catch.hpp>
#include <thread>

#include "kernels/backend.h"
#include "tests/kernels/update_memory.h"
#include "tests/sanitizer.h"

using namespace ballast;
using namespace ballast::kernels;
using ballast::testing::every;

namespace {

bool is_nan_pattern(std::uint32_t pattern) { return (pattern & 0x7fffffffu) > 0x7f800000u; }

// Returns the nearest bf16 number, ties away from zero, in integers: the magnitude's upper half, or the next one if the
// lower half is at least half a step.
std::uint16_t nearest_bf16(std::uint32_t pattern) {
  const std::uint32_t upper = pattern >> 16 & 0x7fffu;
  const std::uint32_t rounded = upper + ((pattern & 0xffffu) >= 0x8000u ? 1 : 0);
  return static_cast<std::uint16_t>(rounded | (pattern >> 16 & 0x8000u));
}

// Checks the formulas on one pattern. NaN has to stay NaN, in the bf16 parameter too.
bool survives(std::uint32_t pattern) {
  const float master = as_float(pattern);
  const std::uint32_t halves = split16(master);
  const auto parameter = static_cast<std::uint16_t>(halves >> 16);
  const std::uint32_t joined = bits(join16(halves));
  // A signalling NaN may hide in the lower half. No arithmetic gives one, so no master is one.
  if (is_nan_pattern(pattern))
    return (pattern & 0x400000u) == 0 || (is_nan_pattern(joined) && (parameter & 0x7fffu) > 0x7f80u);
  return joined == pattern && parameter == nearest_bf16(pattern);
}

std::uint64_t count_failures() {
  const unsigned threads = std::max(2u, std::thread::hardware_concurrency());
  std::atomic<std::uint64_t> failures = 0;
  std::vector<std::jthread> workers;
  for (unsigned worker = 0; worker < threads; ++worker) {
    workers.emplace_back([&, worker] {
      std::uint64_t failed = 0;
      const std::uint64_t all = std::uint64_t{1} << 32;
      for (std::uint64_t i = all * worker / threads; i < all * (worker + 1) / threads; i += every(61)) {
        if (!survives(static_cast<std::uint32_t>(i))) ++failed;
      }
      failures += failed;
    });
  }
  workers.clear();
  return failures;
}

// A tile for the walk itself: a step that changes nothing reads, joins, splits and writes each pattern.
TileMemory tile_of(std::vector<std::uint16_t>& parameters, std::vector<std::uint16_t>& remainders,
                   std::vector<std::uint16_t>& gradients) {
  return {.format = StateFormat::split,
          .parameter = reinterpret_cast<std::byte*>(parameters.data()),
          .gradient = reinterpret_cast<const std::byte*>(gradients.data()),
          .master = reinterpret_cast<std::byte*>(remainders.data()),
          .count = parameters.size()};
}

std::uint32_t master_pattern(const TileMemory& tile, std::size_t i) {
  std::uint32_t pattern = 0;
  if (tile.format == StateFormat::fp32) {
    std::memcpy(&pattern, tile.master + 4 * i, 4);
    return pattern;
  }
  std::uint16_t parameter;
  std::int16_t remainder;
  std::memcpy(&parameter, tile.parameter + 2 * i, 2);
  std::memcpy(&remainder, tile.master + 2 * i, 2);
  return (std::uint32_t{parameter} << 16) + static_cast<std::uint32_t>(std::int32_t{remainder});
}

}  // namespace

TEST_CASE("a master is restored from its two halves, for every one of the 2^32 patterns") {
  CHECK(count_failures() == 0);
}

TEST_CASE(
    "an update that changes nothing leaves every split parameter and remainder as it is, on every instruction set") {
  // Use every parameter pattern, with remainders that reach both ends.
  constexpr std::int16_t chosen[] = {-32768, -32767, -1, 0, 1, 12345, 32767};
  std::vector<std::uint16_t> parameters, remainders;
  for (std::uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    for (const std::int16_t remainder : chosen) {
      const std::uint32_t master = (pattern << 16) + static_cast<std::uint32_t>(std::int32_t{remainder});
      const bool arises = !is_nan_pattern(master) && nearest_bf16(master) == pattern;
      if (arises) {
        parameters.push_back(static_cast<std::uint16_t>(pattern));
        remainders.push_back(static_cast<std::uint16_t>(remainder));
      }
    }
  }
  std::vector<std::uint16_t> gradients(parameters.size(), 0);
  const std::vector<GroupStep> groups{{.rule = Sgd{.lr = 0.0f, .l2 = 0.0f}}};
  for (const simd::Isa isa : simd::usable_isas()) {
    auto new_parameters = parameters;
    auto new_remainders = remainders;
    const TileMemory tile = tile_of(new_parameters, new_remainders, gradients);
    const std::vector<Run> runs{{0, tile.count, 0}};
    cpu_backend({.threads = 2, .isa = isa})->update(tile, runs, groups);
    INFO(simd::name(isa));
    std::size_t different = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      // 0 * infinity is NaN, and -0 + 0 is 0. Neither says anything about the format.
      const bool finite = (parameters[i] & 0x7fff) < 0x7f80 && parameters[i] != 0x8000;
      if (finite && (parameters[i] != new_parameters[i] || remainders[i] != new_remainders[i])) ++different;
    }
    CHECK(different == 0);
  }
}

TEST_CASE("split gives the bits of fp32 over many steps") {
  constexpr std::size_t count = 5000;
  for (const Rule& rule : sample_rules()) {
    UpdateMemory whole({.format = StateFormat::fp32, .count = count});
    UpdateMemory halves({.format = StateFormat::split, .count = count});
    const TileMemory fp32 = whole.tile();
    const TileMemory split = halves.tile();
    for (std::size_t i = 0; i < count; ++i) {  // the same master, and the parameter that belongs to it
      const std::uint32_t pattern = master_pattern(split, i);
      std::memcpy(fp32.master + 4 * i, &pattern, 4);
    }
    std::memcpy(split.momentum, fp32.momentum, 4 * count);
    std::memcpy(split.variance, fp32.variance, 4 * count);
    std::memcpy(const_cast<std::byte*>(split.gradient), fp32.gradient, 2 * count);
    const std::vector<Run> runs{{0, count, 0}};
    for (int step = 0; step < 100; ++step) {
      const std::vector<GroupStep> groups{{.rule = rule, .gradient_factor = step % 3 == 0 ? -0.7f : 0.4f}};
      cpu_backend({.threads = 1})->update(fp32, runs, groups);
      cpu_backend({.threads = 1})->update(split, runs, groups);
    }
    INFO("rule " << rule.index());
    std::size_t different_masters = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (master_pattern(fp32, i) != master_pattern(split, i)) ++different_masters;
    }
    CHECK(different_masters == 0);
    CHECK(std::memcmp(fp32.parameter, split.parameter, 2 * count) == 0);
    CHECK(std::memcmp(fp32.momentum, split.momentum, 4 * count) == 0);
    CHECK(std::memcmp(fp32.variance, split.variance, 4 * count) == 0);
  }
}

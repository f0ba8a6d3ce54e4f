// Tests of the 8-bit moments of format compact: the values of the codes, their errors, and the values that are kept
// exactly.
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>

#include "kernels/backend.h"
#include "kernels/state_math.h"
#include "tests/kernels/update_memory.h"
#include "tests/kernels/update_reference.h"

using namespace ballast;
using namespace ballast::kernels;

namespace {

constexpr std::uint32_t any_random[] = {0u, 0xffffffffu, 0x5a5a5a5au, 0xa5a5a5a5u, 0x80000000u, 0x0003ffffu};

std::uint32_t sign_extended(std::uint32_t code) {
  return static_cast<std::uint32_t>(static_cast<std::int8_t>(static_cast<std::uint8_t>(code)));
}

struct Scaled {
  float factor;
  float scale;
};

Scaled scaled_by(float largest) { return {compand_factor(largest), compand_scale(largest)}; }

float momentum_through(float m, float largest, std::uint32_t random) {
  const Scaled s = scaled_by(largest);
  return expand_momentum<float>(sign_extended(compand_momentum(m, s.factor, random)), s.scale);
}

std::uint32_t root_code_of(float root, float largest, std::uint32_t random) {
  return compand_root(root, scaled_by(largest).factor, random) & 0xffu;
}

float root_through(float root, float largest, std::uint32_t random) {
  return expand_root<float>(root_code_of(root, largest, random), scaled_by(largest).scale);
}

// AdamW with coefficients that leave both moments as they are.
Rule keeps_moments() {
  return AdamW{.decay = 1.0f,
               .one_minus_beta1 = 0.0f,
               .beta2 = 1.0f,
               .one_minus_beta2 = 0.0f,
               .inverse_root_correction2 = 1.0f,
               .eps = 1e-8f,
               .step_size = 0.0f};
}

void step(const TileMemory& tile, const Rule& rule) {
  const std::vector<Run> runs{{0, tile.count, 0}};
  const std::vector<GroupStep> groups{{.rule = rule}};
  cpu_backend({.threads = 1})->update(tile, runs, groups);
}

}  // namespace

TEST_CASE("a code stands for eight segments, each twice as coarse as the one before") {
  for (const float scale : {1.0f, 0.037f, 1e-20f}) {
    for (unsigned code = 0; code < 256; ++code) {
      const auto byte = static_cast<std::uint8_t>(code);
      CHECK(double{expand_momentum<float>(sign_extended(code), scale)} ==
            Approx(momentum_code(byte) * double{scale}).epsilon(1e-6));
      CHECK(double{expand_root<float>(code, scale)} == Approx(root_code(byte) * double{scale}).epsilon(1e-6));
    }
  }
}

TEST_CASE("a moment is stored within 1/16 of itself plus 1/2,048 of the largest, a root within half") {
  for (const float largest : {1.0f, 3e-9f, 7e12f, 0x1p-126f}) {
    for (int i = 0; i <= 10'000; ++i) {
      const float size = largest * static_cast<float>(i) / 10'000.0f;
      for (const std::uint32_t random : any_random) {
        for (const float m : {size, -size}) {
          REQUIRE(std::abs(momentum_through(m, largest, random) - m) <= size / 16 + largest / 2048);
        }
        REQUIRE(std::abs(root_through(size, largest, random) - size) <= size / 32 + largest / 4096);
      }
    }
  }
}

TEST_CASE("the largest of a group is stored within 1/8,000 of itself, or rarely one code lower") {
  for (float largest = 0x1p-126f; largest < 1e38f; largest *= 1.37f) {
    for (const std::uint32_t random : {0u, 0x5a5a5a5au, 0xa5a5a5a5u, 0xffffffffu}) {
      const float kept = random == 0 ? 1.0f / 30 : 1.0f / 8000;
      REQUIRE(std::abs(momentum_through(largest, largest, random) / largest - 1) <= kept);
      REQUIRE(std::abs(momentum_through(-largest, largest, random) / largest + 1) <= kept);
      REQUIRE(std::abs(root_through(largest, largest, random) / largest - 1) <= kept);
    }
  }
}

TEST_CASE("a root never has code 0, so no root decays to zero between steps") {
  for (const float root : {0.0f, 1e-30f, 0x1p-63f, 1e-5f}) {
    for (const std::uint32_t random : any_random) {
      CHECK(root_code_of(root, 1.0f, random) >= 1);
    }
  }
}

TEST_CASE("moments that no step changes do not drift") {
  UpdateMemory memory({.format = StateFormat::compact, .count = 1024});
  const TileMemory tile = memory.tile();
  step(tile, keeps_moments());
  std::vector<double> means;
  for (int i = 0; i < 200; ++i) {
    step(tile, keeps_moments());
    double sum = 0;
    for (std::size_t k = 0; k < 1024; ++k)
      sum += std::sqrt(state_of(tile, k, keeps_moments()).variance);
    means.push_back(sum);
  }
  CHECK(means.back() == Approx(means.front()).epsilon(0.02));
}

TEST_CASE("a group of zeros stays zero") {
  UpdateMemory memory({.format = StateFormat::compact, .count = 300});
  const TileMemory tile = memory.tile();
  std::memset(const_cast<std::byte*>(tile.gradient), 0, 600);
  std::memset(tile.momentum, 0, 300);
  std::memset(tile.variance, 0, 300);
  for (std::size_t group = 0; group < 3; ++group)
    tile.momentum_scales[group] = tile.variance_scales[group] = 0;
  const Element before = state_of(tile, 17, keeps_moments());
  for (int i = 0; i < 10; ++i)
    step(tile, sample_rules().front());
  for (std::size_t i = 0; i < 300; ++i) {
    const Element now = state_of(tile, i, keeps_moments());
    REQUIRE(now.momentum == 0);
    REQUIRE(now.variance <= 0x1p-125);
    REQUIRE(std::isfinite(now.parameter));
  }
  // Only decay has moved the parameter, ten times.
  CHECK(state_of(tile, 17, keeps_moments()).parameter == Approx(before.parameter * std::pow(0.999, 10)).epsilon(1e-4));
}

TEST_CASE("a group of the smallest values stays at them") {
  UpdateMemory memory({.format = StateFormat::compact, .count = 128});
  const TileMemory tile = memory.tile();
  std::memset(const_cast<std::byte*>(tile.gradient), 0, 256);
  tile.momentum_scales[0] = 0x1p-126f;
  tile.variance_scales[0] = 0x1p-63f;
  for (int i = 0; i < 2000; ++i)
    step(tile, sample_rules().front());
  for (std::size_t i = 0; i < 128; ++i) {
    const Element now = state_of(tile, i, keeps_moments());
    REQUIRE(std::abs(now.momentum) <= 0x1p-125);
    REQUIRE(now.variance <= 0x1p-124);
    REQUIRE(std::isfinite(now.parameter));
  }
}

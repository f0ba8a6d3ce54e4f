// Tests of the moments' codes of formats compact and 4bit: their values, their errors, and the values that are kept
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

constexpr std::uint32_t any_random[] = {0u,          0xffffffffu, 0x5a5a5a5au, 0xa5a5a5a5u,
                                        0x80000000u, 0x0003ffffu, 0x003fffffu};

struct Compact : MomentCodes<StateFormat::compact> {
  static constexpr StateFormat format = StateFormat::compact;
  // Bounds on errors: of the value itself, and of the largest of its group.
  static constexpr float momentum_step = 1.0f / 16, momentum_base = 1.0f / 2048;
  static constexpr float root_step = 1.0f / 32, root_base = 1.0f / 4096;
};
struct FourBit : MomentCodes<StateFormat::four_bit> {
  static constexpr StateFormat format = StateFormat::four_bit;
  static constexpr float momentum_step = 1.0f, momentum_base = 1.0f / 127;
  static constexpr float root_step = 1.0f / 2, root_base = 1.0f / 96;
};

template <class Code>
std::uint32_t code_of(float x, float largest, std::uint32_t random) {
  return Code::encode(x, Code::factor(largest), random) & ((1u << Code::bits_of_code) - 1);
}

template <class Code>
float through(float x, float largest, std::uint32_t random) {
  return Code::decode(code_of<Code>(x, largest, random), Code::scale(largest));
}

// AdamW with coefficients that leave both moments as they are.
Rule keeps_moments() {
  return AdamW{.decay = 1.0f,
               .mean = RunningMean::of(1.0),
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

TEMPLATE_TEST_CASE("a code stands for its value times its group's scale", "", Compact, FourBit) {
  for (const float scale : {1.0f, 0.037f, 1e-20f}) {
    for (unsigned code = 0; code < 1u << TestType::Root::bits_of_code; ++code) {
      const auto byte = static_cast<std::uint8_t>(code);
      CHECK(double{TestType::Momentum::decode(code, scale)} ==
            Approx(momentum_code(TestType::format, byte) * double{scale}).epsilon(1e-6));
      CHECK(double{TestType::Root::decode(code, scale)} ==
            Approx(root_code(TestType::format, byte) * double{scale}).epsilon(1e-6));
    }
  }
}

TEMPLATE_TEST_CASE("a moment is stored within a step of its code", "", Compact, FourBit) {
  for (const float largest : {1.0f, 3e-9f, 7e12f, 0x1p-126f}) {
    for (int i = 0; i <= 10'000; ++i) {
      const float size = largest * static_cast<float>(i) / 10'000.0f;
      for (const std::uint32_t random : any_random) {
        for (const float m : {size, -size}) {
          REQUIRE(std::abs(through<typename TestType::Momentum>(m, largest, random) - m) <=
                  size * TestType::momentum_step + largest * TestType::momentum_base);
        }
        REQUIRE(std::abs(through<typename TestType::Root>(size, largest, random) - size) <=
                size * TestType::root_step + largest * TestType::root_base);
      }
    }
  }
}

TEST_CASE("the largest of a group of compact is stored within 1/8,000 of itself, or rarely one code lower") {
  for (float largest = 0x1p-126f; largest < 1e38f; largest *= 1.37f) {
    for (const std::uint32_t random : {0u, 0x5a5a5a5au, 0xa5a5a5a5u, 0xffffffffu}) {
      const float kept = random == 0 ? 1.0f / 30 : 1.0f / 8000;
      REQUIRE(std::abs(through<Compact::Momentum>(largest, largest, random) / largest - 1) <= kept);
      REQUIRE(std::abs(through<Compact::Momentum>(-largest, largest, random) / largest + 1) <= kept);
      REQUIRE(std::abs(through<Compact::Root>(largest, largest, random) / largest - 1) <= kept);
    }
  }
}

TEST_CASE("the largest momentum of a group of 4bit is stored within 1/100,000 of itself, or rarely one code lower") {
  for (float largest = 0x1p-126f; largest < 1e38f; largest *= 1.37f) {
    for (const std::uint32_t random : {0u, 0x5a5a5a5au, 0xa5a5a5a5u, 0xffffffffu}) {
      const float kept = random == 0 ? 0.51f : 1e-5f;
      REQUIRE(std::abs(through<FourBit::Momentum>(largest, largest, random) / largest - 1) <= kept);
      REQUIRE(std::abs(through<FourBit::Momentum>(-largest, largest, random) / largest + 1) <= kept);
    }
  }
}

TEST_CASE("the scale of 4-bit roots is the smallest power of two that 3/2 of it reaches the largest") {
  for (float largest = 0x1p-63f; largest < 1e19f; largest *= 1.037f) {
    const float scale = FourBit::Root::scale(largest);
    int exponent;
    REQUIRE(std::frexp(scale, &exponent) == 0.5f);
    REQUIRE(largest <= 1.5f * scale);
    REQUIRE(largest > 0.75f * scale);
    REQUIRE(FourBit::Root::factor(largest) * scale == 1.0f);
  }
  CHECK(FourBit::Root::scale(1.5f) == 1.0f);
  CHECK(FourBit::Root::scale(std::nextafter(1.5f, 2.0f)) == 2.0f);
  CHECK(FourBit::Root::scale(0.0f) == 0.0f);
  for (const float bad : {HUGE_VALF, std::nanf(""), as_float(0x7f800001u), as_float(0x7fffffffu)}) {
    CHECK(std::isnan(FourBit::Root::scale(bad)));
  }
}

TEST_CASE("a 4-bit root keeps its value when the largest of its group changes") {
  for (unsigned code = 4; code < 16; ++code) {
    const float root = FourBit::Root::decode(code, 1.0f);
    for (const float largest : {1.1f, 1.5f, 1.6f, 3.0f, 5.9f}) {
      for (const std::uint32_t random : any_random) {
        CHECK(through<FourBit::Root>(root, largest, random) == root);
      }
    }
  }
}

TEMPLATE_TEST_CASE("no root decays to zero between steps", "", Compact, FourBit) {
  for (const float root : {0.0f, 1e-30f, 0x1p-63f, 1e-5f}) {
    for (const std::uint32_t random : any_random) {
      CHECK(through<typename TestType::Root>(root, 1.0f, random) > 0.0f);
    }
  }
}

TEMPLATE_TEST_CASE("moments that no step changes do not drift", "", Compact, FourBit) {
  UpdateMemory memory({.format = TestType::format, .count = 1024});
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

TEMPLATE_TEST_CASE("a group of zeros stays zero", "", Compact, FourBit) {
  UpdateMemory memory({.format = TestType::format, .count = 300});
  const TileMemory tile = memory.tile();
  std::memset(const_cast<std::byte*>(tile.gradient), 0, 600);
  std::memset(tile.momentum, 0, moment_bytes(tile.format, 300));
  std::memset(tile.variance, 0, moment_bytes(tile.format, 300));
  for (std::size_t group = 0; group < 3; ++group)
    tile.momentum_scales[group] = tile.variance_scales[group] = 0;
  const Element before = state_of(tile, 17, keeps_moments());
  for (int i = 0; i < 10; ++i)
    step(tile, sample_rules().front());
  for (std::size_t i = 0; i < 300; ++i) {
    const Element now = state_of(tile, i, keeps_moments());
    REQUIRE(now.momentum == 0);
    REQUIRE(now.variance <= 0x1p-119);
    REQUIRE(std::isfinite(now.parameter));
  }
  // Decay alone has moved the parameter, ten times.
  CHECK(state_of(tile, 17, keeps_moments()).parameter == Approx(before.parameter * std::pow(0.999, 10)).epsilon(1e-4));
}

TEMPLATE_TEST_CASE("a group of the smallest values stays at them", "", Compact, FourBit) {
  UpdateMemory memory({.format = TestType::format, .count = 128});
  const TileMemory tile = memory.tile();
  std::memset(const_cast<std::byte*>(tile.gradient), 0, 256);
  tile.momentum_scales[0] = 0x1p-126f;
  tile.variance_scales[0] = 0x1p-63f;
  for (int i = 0; i < 2000; ++i)
    step(tile, sample_rules().front());
  for (std::size_t i = 0; i < 128; ++i) {
    const Element now = state_of(tile, i, keeps_moments());
    REQUIRE(std::abs(now.momentum) <= 0x1p-125);
    REQUIRE(now.variance <= 0x1p-118);
    REQUIRE(std::isfinite(now.parameter));
  }
}

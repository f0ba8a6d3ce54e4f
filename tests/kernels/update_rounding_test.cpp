// Tests that stochastic rounding has no bias and good random bits, and that each key always draws the same bits.
#include <array>
#include <catch2/catch.hpp>
#include <cmath>

#include "kernels/backend.h"
#include "kernels/random_math.h"
#include "kernels/state_math.h"
#include "tests/kernels/update_memory.h"
#include "tests/kernels/update_reference.h"

using namespace ballast;
using namespace ballast::kernels;

namespace {

std::uint32_t random_at(std::uint64_t stream, std::uint64_t index) {
  return random_bits(static_cast<std::uint32_t>(index), rounding_key(stream, index));
}

// Returns how far a count of `trials` fair coins may lie from its mean: five standard deviations, exceeded once in 1.7
// million.
double room(double trials) { return 5 * std::sqrt(trials) / 2; }

using BitCounts = std::array<double, 32>;

void count_bits(BitCounts& counts, std::uint32_t word) {
  for (std::size_t bit = 0; bit < 32; ++bit)
    counts[bit] += word >> bit & 1;
}

double worst_imbalance(const BitCounts& counts, double trials) {
  double worst = 0;
  for (const double count : counts)
    worst = std::max(worst, std::abs(count - trials / 2));
  return worst;
}

constexpr std::uint64_t trials = 1 << 20;

// Checks that the mean of many roundings, in steps of the kept bits, lies within five standard deviations of the value.
// Each rounding is a coin that goes one step up with probability `above`.
template <class Round>
void check_unbiased(double above, const Round& round) {
  double ups = 0;
  for (std::uint64_t i = 0; i < trials; ++i)
    ups += round(random_at(rounding_stream(1, 2, i % 64), i / 64));
  const double n = static_cast<double>(trials);
  CHECK(std::abs(ups - n * above) <= 5 * std::sqrt(n * above * (1 - above)));
}

}  // namespace

TEST_CASE("every random bit is set half of the time, along elements and along steps") {
  BitCounts along_elements{};
  BitCounts along_steps{};
  for (std::uint64_t i = 0; i < trials; ++i) {
    count_bits(along_elements, random_at(rounding_stream(7, 3, 1), i));
    count_bits(along_steps, random_at(rounding_stream(7, 3, i), 12345));
  }
  const double n = static_cast<double>(trials);
  CHECK(worst_imbalance(along_elements, n) <= room(n));
  CHECK(worst_imbalance(along_steps, n) <= room(n));
}

TEST_CASE(
    "random bits of neighbouring elements, consecutive steps and neighbouring units do not depend on one another") {
  // Compare any bit of one word with any bit of the other: 32 rotations cover each pair of positions.
  const auto check = [](auto first, auto second) {
    for (int turn = 0; turn < 32; ++turn) {
      BitCounts differ{};
      const std::uint64_t n = trials / 16;
      for (std::uint64_t i = 0; i < n; ++i)
        count_bits(differ, first(i) ^ std::rotl(second(i), turn));
      CHECK(worst_imbalance(differ, static_cast<double>(n)) <= room(static_cast<double>(n)) * 1.2);  // 1,024 pairs
    }
  };
  const std::uint64_t stream = rounding_stream(1, 5, 100);
  const std::uint64_t next_step = rounding_stream(1, 5, 101);
  const std::uint64_t next_number = rounding_stream(1, 6, 100);
  const auto here = [=](std::uint64_t i) { return random_at(stream, i); };
  check(here, [=](std::uint64_t i) { return random_at(stream, i + 1); });
  check(here, [=](std::uint64_t i) { return random_at(stream, i + 128); });
  check(here, [=](std::uint64_t i) { return random_at(next_step, i); });
  check(here, [=](std::uint64_t i) { return random_at(next_number, i); });
}

TEST_CASE("elements beyond 2^32 draw bits of their own") {
  const std::uint64_t stream = rounding_stream(1, 5, 100);
  const std::uint64_t high = std::uint64_t{1} << 32;
  std::size_t equal = 0;
  for (std::uint64_t i = 0; i < 65'536; ++i) {
    if (random_at(stream, i) == random_at(stream, i + high)) ++equal;
    if (random_at(stream, i) == random_at(stream, i + 256 * high)) ++equal;
  }
  CHECK(equal <= 1);  // 3e-5 are expected
}

TEST_CASE("the same element, step, unit and seed draw the same bits, and any other key draws others") {
  CHECK(rounding_stream(1, 2, 3) == rounding_stream(1, 2, 3));
  CHECK(rounding_stream(1, 2, 3) != rounding_stream(1, 3, 2));
  CHECK(rounding_stream(1, 2, 3) != rounding_stream(2, 2, 3));
  CHECK(random_at(rounding_stream(1, 2, 3), 4) == random_at(rounding_stream(1, 2, 3), 4));
}

TEST_CASE("rounding a moment to bf16 is unbiased") {
  for (const std::uint32_t low : {0x0001u, 0x1000u, 0x7fffu, 0x8000u, 0xfff0u}) {
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const float x = as_float(sign | 0x3f810000u | low);
      const std::uint32_t down = (sign | 0x3f810000u) >> 16;
      check_unbiased(low / 65536.0, [=](std::uint32_t random) {
        return static_cast<double>((add_noise(x, random & 0xffffu) >> 16) - down);
      });
      check_unbiased(low / 65536.0, [=](std::uint32_t random) {
        return static_cast<double>((add_noise(x, random >> 16) >> 16) - down);
      });
    }
  }
}

TEST_CASE("rounding a master to 24 bits is unbiased, and its two parts give the rounded value") {
  for (const std::uint32_t low : {0x01u, 0x40u, 0x80u, 0xf0u}) {
    for (const std::uint32_t high : {0x3f812300u, 0xbf81ff00u, 0x3f817f00u}) {
      const float master = as_float(high | low);
      check_unbiased(low / 256.0, [=](std::uint32_t random) {
        const auto parts = split8(master, random);
        const auto remainder = static_cast<std::uint32_t>(static_cast<std::int8_t>(parts.remainder & 0xffu));
        const float back = join8(parts.parameter & 0xffff0000u, remainder);
        return static_cast<double>((bits(back) - high) >> 8);
      });
    }
  }
}

namespace {

// Rounds a value 0.3 of a step above each of these codes, of a group whose scale is 1/128.
template <class Code, class ValueOfCode>
void check_code_is_unbiased(std::initializer_list<unsigned> codes, const ValueOfCode& value_of) {
  constexpr float factor = 128.0f;
  for (const unsigned code : codes) {
    const double low = value_of(static_cast<std::uint8_t>(code));
    const double high = value_of(static_cast<std::uint8_t>(code + 1));
    const auto size = static_cast<float>((low + 0.3 * (high - low)) / double{factor});
    check_unbiased(0.3, [=](std::uint32_t random) {
      constexpr std::uint32_t mask = (1u << Code::bits_of_code) - 1;
      return static_cast<double>(Code::encode(size, factor, random) & mask) - code;
    });
  }
}

template <StateFormat format>
void check_codes_are_unbiased(std::initializer_list<unsigned> momenta, std::initializer_list<unsigned> roots) {
  using Codes = MomentCodes<format>;
  check_code_is_unbiased<typename Codes::Momentum>(momenta,
                                                   [](std::uint8_t code) { return momentum_code(format, code); });
  check_code_is_unbiased<typename Codes::Root>(roots, [](std::uint8_t code) { return root_code(format, code); });
}

}  // namespace

TEST_CASE("rounding moments to codes is unbiased, above the smallest code") {
  check_codes_are_unbiased<StateFormat::compact>({5u, 20u, 60u, 100u}, {5u, 40u, 130u, 220u});
  check_codes_are_unbiased<StateFormat::four_bit>({0u, 1u, 2u, 3u, 4u, 5u, 6u},
                                                  {0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 10u, 11u, 12u, 13u, 14u});
}

TEST_CASE("moments that decay for 500 steps keep their mean in bf16 and compact") {
  // A step of 1/1,000 is an eighth of the distance between bf16 numbers, so rounding to nearest would change nothing.
  constexpr std::size_t count = 16'384;
  constexpr int steps = 500;
  AdamW rule = std::get<AdamW>(sample_rules().front());
  rule.mean = RunningMean::of(0.999);
  rule.beta2 = 0.999f;
  for (const StateFormat format : {StateFormat::bf16, StateFormat::compact}) {
    UpdateMemory memory({.format = format, .count = count});
    const TileMemory tile = memory.tile();
    std::memset(const_cast<std::byte*>(tile.gradient), 0, 2 * count);
    const auto mean = [&] {
      Element sum;
      for (std::size_t i = 0; i < count; ++i) {
        const Element element = state_of(tile, i, rule);
        sum.momentum += std::abs(element.momentum) / count;
        sum.variance += element.variance / count;
      }
      return sum;
    };
    const std::vector<Run> runs{{0, count, 0}};
    const std::vector<GroupStep> groups{{.rule = rule}};
    const auto backend = cpu_backend({.threads = 1});
    const Element before = mean();
    for (std::uint64_t step = 0; step < steps; ++step) {
      TileMemory now = tile;
      now.rounding_stream = rounding_stream(0, 0, step);
      backend->update(now, runs, groups);
    }
    const Element after = mean();
    INFO(name(format));
    CHECK(after.momentum / before.momentum == Approx(std::pow(0.999, steps)).epsilon(0.005));
    CHECK(after.variance / before.variance == Approx(std::pow(0.999, steps)).epsilon(0.005));
  }
}

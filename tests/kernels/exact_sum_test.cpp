#include "kernels/exact_sum_math.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace ballast::kernels {
namespace {

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// Computes the same sum slowly: one bool for each bit from 2^-400 up, with rippling carries.
class BitSum {
 public:
  void add(double x) {
    int exponent = 0;
    auto mantissa = static_cast<std::uint64_t>(std::ldexp(std::frexp(x, &exponent), 53));
    for (int bit = exponent - 53 + 400; mantissa != 0; ++bit, mantissa >>= 1) {
      if (mantissa % 2 == 1) {
        add_bit(static_cast<std::size_t>(bit));
      }
    }
  }

  double rounded() const {
    const auto top = std::find(bits_.rbegin(), bits_.rend(), true);
    if (top == bits_.rend()) {
      return 0;
    }
    const auto highest = static_cast<std::ptrdiff_t>(bits_.rend() - top - 1);
    const std::ptrdiff_t last = std::max<std::ptrdiff_t>(highest - 52, 1);
    double mantissa = 0;
    for (std::ptrdiff_t i = highest; i >= last; --i) {
      mantissa = 2 * mantissa + (bits_[static_cast<std::size_t>(i)] ? 1 : 0);
    }
    const bool half = bits_[static_cast<std::size_t>(last - 1)];
    const bool more = std::find(bits_.begin(), bits_.begin() + last - 1, true) != bits_.begin() + last - 1;
    if (half && (more || std::fmod(mantissa, 2) == 1)) {
      mantissa += 1;
    }
    return std::ldexp(mantissa, static_cast<int>(last) - 400);
  }

 private:
  void add_bit(std::size_t at) {
    while (bits_[at]) {
      bits_[at++] = false;
    }
    bits_[at] = true;
  }

  std::vector<bool> bits_ = std::vector<bool>(800);
};

std::vector<double> values_of_every_size(std::size_t count, std::uint32_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<int> exponent(-300, 262);
  std::vector<double> numbers(count);
  for (double& x : numbers) {
    x = std::ldexp(1.0 + std::ldexp(static_cast<double>(random() >> 12), -52), exponent(random));
  }
  return numbers;
}

ExactSum sum_of(const std::vector<double>& numbers) {
  ExactSum sum;
  for (const double x : numbers) {
    add(sum, x);
  }
  carry(sum);
  return sum;
}

static_assert(value(ExactSum{}) == 0.0);
static_assert([] {
  ExactSum sum;
  add(sum, 1.5);
  add(sum, 0x1p-298);
  return value(sum);
}() == 1.5);

}  // namespace

TEST_CASE("the exact sum of one value is that value") {
  for (const double x : values_of_every_size(10'000, 1)) {
    REQUIRE(value(sum_of({x})) == x);
  }
  for (const double x : {0.0, 0x1p-300, 0x1p-298, 0x1.fffffffffffffp275, 128 * 0x1.fffffep127 * 0x1.fffffep127}) {
    CHECK(value(sum_of({x})) == x);
  }
}

TEST_CASE("an exact sum is the true sum, rounded once") {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    const std::vector<double> numbers = values_of_every_size(1 + 7 * seed, seed);
    BitSum reference;
    for (const double x : numbers) {
      reference.add(x);
    }
    REQUIRE(value(sum_of(numbers)) == reference.rounded());
  }
}

TEST_CASE("ties in an exact sum go to even, and the least bit below breaks them") {
  CHECK(value(sum_of({0x1p53, 1})) == 0x1p53);
  CHECK(value(sum_of({0x1p53, 1, 0x1p-300})) == 0x1p53 + 2);
  CHECK(value(sum_of({0x1p53, 2, 1})) == 0x1p53 + 4);
  CHECK(value(sum_of({0x1p53, 2, 1, 0x1p-300})) == 0x1p53 + 4);
  CHECK(value(sum_of({0x1p262, 0x1p209})) == 0x1p262);
  CHECK(value(sum_of({0x1p262, 0x1p209, 0x1p-298})) == std::nextafter(0x1p262, inf));
  CHECK(value(sum_of({0x1.fffffffffffffp52, 0.5})) == 0x1p53);
}

TEST_CASE("any bit below a tie in an exact sum breaks it") {
  for (int exponent = 0; exponent < 64; ++exponent) {
    const double large = std::ldexp(1.0, exponent);
    const double half = std::ldexp(1.0, exponent - 53);
    REQUIRE(value(sum_of({large, half})) == large);
    for (int bit = exponent - 54; bit >= -300; --bit) {
      REQUIRE(value(sum_of({large, half, std::ldexp(1.0, bit)})) == std::nextafter(large, inf));
    }
  }
}

TEST_CASE("the order of an exact sum does not matter, nor how it is cut") {
  std::vector<double> numbers = values_of_every_size(5'000, 3);
  const ExactSum sum = sum_of(numbers);
  std::mt19937 random(4);
  for (int i = 0; i < 10; ++i) {
    std::shuffle(numbers.begin(), numbers.end(), random);
    CHECK(sum_of(numbers) == sum);
    const auto cut = numbers.begin() + static_cast<std::ptrdiff_t>(random() % numbers.size());
    ExactSum parts = sum_of({cut, numbers.end()});
    merge(parts, sum_of({numbers.begin(), cut}));
    CHECK(parts == sum);
  }
  std::ranges::sort(numbers);
  CHECK(sum_of(numbers) == sum);
}

TEST_CASE("a million additions between two carries are exact") {
  for (const double x : {0x1.fffffffffffffp0, 0x1.fffffffffffffp-299, 0x1.fffffffffffffp262, 1.0 / 3}) {
    ExactSum sum;
    for (int i = 0; i < 1 << 20; ++i) {
      add(sum, x);
    }
    CHECK(value(sum) == x * 0x1p20);
    for (int doublings = 1; doublings <= 18; ++doublings) {
      merge(sum, ExactSum(sum));
      REQUIRE(value(sum) == std::ldexp(x, 20 + doublings));
    }
  }
}

TEST_CASE("the promised number of additions fits between two carries") {
  const double x = std::ldexp(static_cast<double>(0xffffffffu), exact_sum_unit + 64);  // fills the third bin
  const std::int64_t additions = std::int64_t{1} << 31;
  ExactSum sum = sum_of({x});
  REQUIRE(sum.bins[2] == 0xffffffff);
  sum.bins[2] *= additions;
  CHECK(value(sum) == x * static_cast<double>(additions));
  carry(sum);
  CHECK(value(sum) == x * static_cast<double>(additions));
}

TEST_CASE("an exact sum of infinities is infinite, and one with a NaN is NaN") {
  CHECK(value(sum_of({1, inf, 2})) == inf);
  CHECK(std::isnan(value(sum_of({1, nan, 2}))));
  CHECK(std::isnan(value(sum_of({inf, nan}))));
  ExactSum merged = sum_of({1});
  merge(merged, sum_of({inf, inf}));
  merge(merged, sum_of({nan}));
  CHECK(merged.infinite == 2);
  CHECK(merged.nan == 1);
}

}  // namespace ballast::kernels

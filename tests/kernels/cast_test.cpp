#include <bit>
#include <cstring>
#include <numeric>
#include <utility>

#include "tests/kernels/device_backends.h"
#include "tests/kernels/number_reference.h"
#include "tests/sanitizer.h"

namespace ballast::kernels {
namespace {

std::uint32_t expected_cast(DType from, DType to, std::uint32_t pattern) {
  return from == to ? pattern : nearest_pattern(to, value_of(from, pattern));
}

// Checks that both patterns stand for the same value, or for NaN. Equal formats must have equal bits.
bool right(DType from, DType to, std::uint32_t source, std::uint32_t result) {
  if (from != to && std::isnan(value_of(from, source))) {
    return std::isnan(value_of(to, result));
  }
  return result == expected_cast(from, to, source);
}

Patterns plain_cast(const Patterns& patterns, DType from, DType to) {
  const std::vector<std::byte> source = packed(patterns, from);
  std::vector<std::byte> target(patterns.size() * byte_size(to));
  plain_backend().cast({source.data(), patterns.size(), from}, {target.data(), patterns.size(), to});
  return unpacked(target, to);
}

Patterns cast_on(TestBackend& on, const Patterns& patterns, DType from, DType to, std::size_t offset = 0) {
  const Placed source(on, patterns, from, offset);
  const Placed target(on, Patterns(patterns.size()), to, offset / 2);
  on.kernels().cast(source.view(), target.view());
  return target.read();
}

void check_cast_of(TestBackend& on, std::size_t count, std::size_t offset) {
  for (const DType from : floating_dtypes) {
    const Patterns patterns = any_patterns(from, count, static_cast<std::uint32_t>(count));
    for (const DType to : floating_dtypes) {
      const Patterns result = cast_on(on, patterns, from, to, offset);
      if (result != plain_cast(patterns, from, to)) {
        FAIL("other bits than scalar code: " << name(from) << " to " << name(to) << ", " << count << " elements");
      }
    }
  }
}

void casts_of_few(TestBackend& on) {
  for (std::size_t count = 0; count <= 1100; count += on.every(11)) {
    check_cast_of(on, count, count % 7);
  }
}

void casts_of_many(TestBackend& on) {
  for (const std::size_t count : {65'536u, 65'537u, 200'003u}) {
    check_cast_of(on, count, count % 3);
  }
}

// Large enough to be written past the caches if the target is aligned.
void casts_of_very_many(TestBackend& on) {
  for (const auto& [from, to] : {std::pair(DType::bf16, DType::fp32), std::pair(DType::fp32, DType::bf16)}) {
    const Patterns patterns = finite_patterns(from, 2'200'001, 1);
    const Patterns expected = plain_cast(patterns, from, to);
    CHECK(cast_on(on, patterns, from, to) == expected);
    CHECK(cast_on(on, patterns, from, to, 2) == expected);
  }
}

void all_halves_survive(TestBackend& on) {
  Patterns all(65'536);
  std::iota(all.begin(), all.end(), 0u);
  for (const DType half : {DType::bf16, DType::fp16}) {
    const Patterns wide = cast_on(on, all, half, DType::fp32);
    Patterns back = cast_on(on, wide, DType::fp32, half);
    for (std::uint32_t i = 0; i < all.size(); ++i) {
      const double worth = value_of(half, i);
      const auto got = static_cast<double>(std::bit_cast<float>(wide[i]));
      if (std::isnan(worth) ? !std::isnan(got) || !std::isnan(value_of(half, back[i]))
                            : got != worth || std::signbit(got) != std::signbit(worth) || back[i] != i) {
        FAIL(name(half) << " pattern " << i << " became " << got << " and then " << back[i]);
      }
    }
    CHECK(cast_on(on, all, half, half) == all);
  }
}

// Returns the patterns around each value of a half format and each midpoint between two. Rounding is monotonic, so
// nothing else can go wrong.
Patterns around_every_boundary(DType half) {
  Patterns patterns;
  for (std::uint32_t h = 0; h < 0x10000; ++h) {
    const double here = value_of(half, h);
    const double next = value_of(half, (h & 0x7fff) == 0x7fff ? h : h + 1);
    if (!std::isfinite(here)) {
      continue;
    }
    for (const double x : {here, std::isfinite(next) ? (here + next) / 2 : here + (here - value_of(half, h - 1)) / 2}) {
      const auto pattern = std::bit_cast<std::uint32_t>(static_cast<float>(x));
      for (const std::uint32_t step : {0u, 1u, 2u, ~0u, ~1u}) {
        patterns.push_back(pattern + step);
      }
    }
  }
  return patterns;
}

void rounding_boundaries(TestBackend& on) {
  for (const DType half : {DType::bf16, DType::fp16}) {
    const Patterns patterns = around_every_boundary(half);
    const Patterns result = cast_on(on, patterns, DType::fp32, half);
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      if (!right(DType::fp32, half, patterns[i], result[i])) {
        FAIL(name(half) << " of fp32 pattern " << patterns[i] << " is " << result[i]);
      }
    }
  }
}

// The same as std::fill, but fast under sanitizers too.
void repeat(std::uint16_t value, std::span<std::uint16_t> to) {
  std::size_t done = 0;
  for (; done < std::min<std::size_t>(to.size(), 64); ++done) {
    to[done] = value;
  }
  for (; done < to.size(); done *= 2) {
    std::memcpy(to.data() + done, to.data(), std::min(done, to.size() - done) * sizeof value);
  }
}

// Fills in the expected roundings of the fp32 patterns from `first` on. They are constant from one midpoint to the
// next.
void expect_rounded(DType half, std::uint32_t first, std::span<std::uint16_t> expected) {
  const std::uint32_t infinity = half == DType::bf16 ? 0x7f80u : 0x7c00u;
  const auto sign = static_cast<std::uint16_t>(first >> 31 << 15);
  std::size_t done = 0;
  std::uint32_t h = nearest_pattern(half, static_cast<double>(std::bit_cast<float>(first & 0x7fffffffu)));
  while (done < expected.size()) {
    std::size_t end = expected.size();
    if (h < infinity) {
      const double step =
          h + 1 < infinity ? value_of(half, h + 1) - value_of(half, h) : value_of(half, h) - value_of(half, h - 1);
      const auto midpoint = std::bit_cast<std::uint32_t>(static_cast<float>(value_of(half, h) + step / 2));
      const std::uint32_t last = h % 2 == 0 ? midpoint : midpoint - 1;  // a tie goes to the even one
      end = std::min<std::size_t>(end, last - (first & 0x7fffffffu) + 1);
    }
    repeat(static_cast<std::uint16_t>(sign | h), expected.subspan(done, end - done));
    done = end;
    ++h;
  }
}

}  // namespace

TEST_CASE("casts of 0 to 1,100 elements give the same bits on every instruction set") { on_every_isa(casts_of_few); }
TEST_CASE("casts give the same bits from any number of threads") { on_every_cpu(casts_of_many); }
TEST_CASE("casts larger than the caches give the same bits") { on_every_isa(casts_of_very_many); }
TEST_CASE("every bf16 and fp16 value survives a cast to fp32 and back") { on_every_isa(all_halves_survive); }
TEST_CASE("fp32 is rounded to the nearest bf16 or fp16, a tie to even, at every boundary") {
  on_every_isa(rounding_boundaries);
}

TEST_CASE("CUDA's threads cast as the CPU does") {
  for (auto* const test : {casts_of_few, casts_of_many, all_halves_survive, rounding_boundaries}) {
    on_octets(test);
  }
}
TEST_CASE("CUDA casts as the CPU does", "[gpu]") {
  for (auto* const test : {casts_of_few, casts_of_many, casts_of_very_many, all_halves_survive, rounding_boundaries}) {
    on_cuda(test);
  }
}

TEST_CASE("casts follow the definitions of the formats") {
  for (const DType from : floating_dtypes) {
    for (const DType to : floating_dtypes) {
      const Patterns patterns = any_patterns(from, 200'000, 1);
      const Patterns result = plain_cast(patterns, from, to);
      for (std::size_t i = 0; i < patterns.size(); ++i) {
        if (!right(from, to, patterns[i], result[i])) {
          FAIL(name(from) << " pattern " << patterns[i] << " became " << name(to) << " " << result[i]);
        }
      }
    }
  }
}

TEST_CASE("all finite fp32 patterns are rounded correctly to bf16 and fp16") {
  const std::unique_ptr<Backend> best = cpu_backend({.threads = 1});
  constexpr std::size_t chunk = 1 << 16;
  std::vector<std::uint32_t> patterns(chunk);
  std::vector<std::uint16_t> result(chunk);
  std::vector<std::uint16_t> expected(chunk);
  for (std::uint64_t first = 0; first < 0x1'0000'0000u; first += testing::every(61) * chunk) {
    if ((first & 0x7f800000u) == 0x7f800000u) {
      continue;
    }
    std::iota(patterns.begin(), patterns.end(), static_cast<std::uint32_t>(first));
    for (const DType half : {DType::bf16, DType::fp16}) {
      best->cast({reinterpret_cast<const std::byte*>(patterns.data()), chunk, DType::fp32},
                 {reinterpret_cast<std::byte*>(result.data()), chunk, half});
      expect_rounded(half, static_cast<std::uint32_t>(first), expected);
      if (std::memcmp(result.data(), expected.data(), 2 * chunk) != 0) {
        FAIL(name(half) << " of the fp32 patterns from " << first << " on");
      }
    }
  }
}

TEST_CASE("every fp32 NaN becomes a NaN of the same sign") {
  constexpr std::size_t chunk = 1 << 16;
  Patterns patterns(chunk);
  for (const DType half : {DType::bf16, DType::fp16}) {
    const std::uint32_t infinity = half == DType::bf16 ? 0x7f80u : 0x7c00u;
    for (std::uint32_t first = 0x7f800000u; first < 0x80000000u; first += chunk) {
      std::iota(patterns.begin(), patterns.end(), first + 1);
      patterns.back() = first | 0x80000001u;
      const Patterns result = plain_cast(patterns, DType::fp32, half);
      const auto is_nan = [=](std::uint32_t pattern) { return pattern > infinity && pattern < 0x8000; };
      CHECK(std::all_of(result.begin(), result.end() - 1, is_nan));
      CHECK(is_nan(result.back() - 0x8000));
    }
  }
}

TEST_CASE("a cast from bytes to bytes copies them") {
  std::vector<std::uint8_t> from(100'000);
  std::iota(from.begin(), from.end(), std::uint8_t{0});
  std::vector<std::uint8_t> to(from.size());
  plain_backend().cast(ConstView(std::span(std::as_const(from))), View(std::span(to)));
  CHECK(to == from);
}

}  // namespace ballast::kernels

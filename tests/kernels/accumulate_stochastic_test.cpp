// Tests of sums that are kept in bf16: rounded once to nearest, or accumulated with stochastic rounding.
#include <cmath>

#include "kernels/random_math.h"
#include "tests/kernels/device_backends.h"
#include "tests/kernels/number_reference.h"

namespace ballast::kernels {
namespace {

constexpr RoundingPlace place{.stream = 77, .first_index = std::uint64_t{3} << 31};

double bf16_value(std::uint32_t pattern) { return value_of(DType::bf16, pattern); }

struct Case {
  Patterns from;
  Patterns into;
  std::vector<Run> runs;
  std::size_t offset = 0;  // the offset of both arrays, in elements
};

Patterns accumulated_on(TestBackend& on, const Case& with) {
  const Placed source(on, with.from, DType::bf16, with.offset);
  const Placed target(on, with.into, DType::bf16, with.offset);
  on.kernels().accumulate_stochastic(source.view(), target.view(), with.runs, place);
  return target.read();
}

// Element by element, from the definition.
Patterns expected_of(const Case& with) {
  Patterns result = with.into;
  for (const Run& run : with.runs) {
    for (std::size_t i = 0; i < run.count; ++i) {
      const std::uint64_t index = place.first_index + run.begin + i - run.tensor_begin;
      const std::uint32_t random = random_bits(static_cast<std::uint32_t>(index),
                                               rounding_key(stream_of_tensor(place.stream, run.tensor), index));
      const std::size_t at = run.begin + i;
      const float sum = from_bf16(with.into[at]) + from_bf16(with.from[at]);
      result[at] = std::isnan(sum) ? 0x7fc0u : (bits(sum) + (random & 0xffffu)) >> 16;
    }
  }
  return result;
}

Case case_of(std::size_t count, std::vector<Run> runs, std::size_t offset) {
  return {any_patterns(DType::bf16, count, 3), any_patterns(DType::bf16, count, 4), std::move(runs), offset};
}

void check(TestBackend& on, const Case& with) {
  if (accumulated_on(on, with) != expected_of(with)) FAIL("other bits: " << with.into.size() << " elements");
}

void runs_of_any_length(TestBackend& on) {
  for (std::size_t count = 0; count <= 1100; count += on.every(11)) {
    check(on, case_of(count, {{.count = count, .tensor = count, .tensor_begin = 128 * count}}, count % 3));
  }
}

// Runs with gaps, more than one launch takes, and across 2^32.
void runs_with_gaps(TestBackend& on) {
  std::vector<Run> runs;
  for (std::size_t i = 0; i < 150; ++i) {
    runs.push_back({.begin = 384 * i,
                    .count = i % 5 == 0 ? 0 : 1 + 7 * i % 300,
                    .tensor = i * i,
                    .tensor_begin = i % 2 == 0 ? (std::uint64_t{1} << 31) + 384 * i + 128 : 128 * i});
  }
  check(on, case_of(384 * 150, runs, 0));
  check(on, case_of(384 * 150, runs, 1));
}

void runs_of_many_elements(TestBackend& on) {
  check(on, case_of(200'003,
                    {{.count = 130'000, .tensor = 1}, {.begin = 131'072, .count = 68'931, .tensor_begin = 256}}, 0));
}

// Sums into 16 bits have the bits of sums in fp32 that are cast once.
void check_rounded_sum(TestBackend& on, std::size_t count, DType dtype, DType into, std::size_t arrays) {
  std::vector<Placed> sources;
  std::vector<ConstView> views;
  sources.reserve(arrays);
  for (std::size_t array = 0; array < arrays; ++array) {
    sources.emplace_back(on, any_patterns(dtype, count, static_cast<std::uint32_t>(7 + array)), dtype, array % 3);
    views.push_back(sources.back().view());
  }
  const Placed sum(on, Patterns(count, 0x1234), DType::fp32);
  const Placed cast(on, Patterns(count, 0x1234), into);
  const Placed rounded(on, Patterns(count, 0x1234), into, count % 5);
  on.kernels().sum(views, sum.view());
  on.kernels().cast(sum.view(), cast.view());
  on.kernels().sum(views, rounded.view());
  if (rounded.read() != cast.read()) FAIL("rounded otherwise: " << arrays << " x " << count << " " << name(dtype));
}

void rounded_sums(TestBackend& on) {
  for (std::size_t count = 0; count <= 300; ++count) {
    check_rounded_sum(on, count, floating_dtypes[count % 3], count % 2 == 0 ? DType::bf16 : DType::fp16, 1 + count % 9);
  }
  check_rounded_sum(on, 777, DType::bf16, DType::bf16, Summands::most);
}

void long_rounded_sums(TestBackend& on) {
  check_rounded_sum(on, 200'003, DType::bf16, DType::bf16, 3);
  check_rounded_sum(on, 200'003, DType::bf16, DType::bf16, 70);
  check_rounded_sum(on, 2'200'000, DType::bf16, DType::bf16, 2);  // past the caches
}

void more_than_a_pass(TestBackend& on) { check_rounded_sum(on, 333, DType::bf16, DType::bf16, Summands::most + 9); }

}  // namespace

TEST_CASE("stochastic accumulation has the defined bits on every instruction set") {
  for (auto* const test : {runs_of_any_length, runs_with_gaps, rounded_sums, more_than_a_pass}) {
    on_every_isa(test);
  }
}

TEST_CASE("stochastic accumulation has the same bits from any number of threads") {
  for (auto* const test : {runs_with_gaps, runs_of_many_elements, long_rounded_sums}) {
    on_every_cpu(test);
  }
}

TEST_CASE("CUDA's threads accumulate stochastically as the CPU does") {
  for (auto* const test : {runs_of_any_length, runs_with_gaps, runs_of_many_elements, rounded_sums}) {
    on_octets(test);
  }
}

TEST_CASE("CUDA accumulates stochastically as the CPU does", "[gpu]") {
  for (auto* const test :
       {runs_of_any_length, runs_with_gaps, runs_of_many_elements, rounded_sums, long_rounded_sums}) {
    on_cuda(test);
  }
}

TEST_CASE("a stochastic sum is one of its two neighbours in bf16, and right on average") {
  constexpr std::size_t count = 1 << 20;
  const std::uint32_t large = 0x4380;  // 256, whose neighbours are 2 apart above it and 1 below
  for (const float small : {0.25f, 1.5f, -0.125f, -0.75f}) {
    const std::uint32_t added = to_bf16(small);
    const Case with{Patterns(count, added), Patterns(count, large), {{.count = count, .tensor = 3}}};
    const Patterns result = expected_of(with);
    std::vector<std::byte> memory = packed(with.into, DType::bf16);
    const std::vector<std::byte> from = packed(with.from, DType::bf16);
    plain_backend().accumulate_stochastic({from.data(), count, DType::bf16}, {memory.data(), count, DType::bf16},
                                          with.runs, place);
    REQUIRE(unpacked(memory, DType::bf16) == result);
    double mean = 0;
    for (const std::uint32_t pattern : result) {
      mean += (bf16_value(pattern) - 256.0) / count;
    }
    const double step = small > 0 ? 2.0 : 1.0;
    const double above = std::abs(static_cast<double>(small)) / step;
    CHECK(std::abs(mean - static_cast<double>(small)) <= 5 * step * std::sqrt(above * (1 - above) / count));
  }
}

// 1,000 gradients that rounding to nearest would drop one by one.
TEST_CASE("many small gradients add up") {
  constexpr std::size_t count = 4096;
  std::vector<std::byte> memory = packed(Patterns(count, to_bf16(256.0f)), DType::bf16);
  const std::vector<std::byte> from = packed(Patterns(count, to_bf16(0.125f)), DType::bf16);
  const View into(memory.data(), count, DType::bf16);
  const std::vector<Run> runs{{.count = count}};
  for (std::uint64_t use = 1; use <= 1000; ++use) {
    plain_backend().accumulate_stochastic({from.data(), count, DType::bf16}, into, runs,
                                          {.stream = rounding_stream(seed_of_gradients, use, 1)});
  }
  double mean = 0;
  for (const std::uint32_t pattern : unpacked(memory, DType::bf16)) {
    mean += bf16_value(pattern) / count;
  }
  CHECK(std::abs(mean - (256.0 + 125.0)) <
        1.5);  // 5 standard deviations: each addition has one of 0.48, so 15.3 in all
}

TEST_CASE("sums that bf16 can represent are exact, and NaN and infinity stay") {
  const Patterns into{0x3f80, 0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0x7f80, 0x3f80};
  const Patterns from{0x3f80, 0x4049, 0x8000, 0x3f80, 0x3f80, 0x3f80, 0xff80, 0xbf80};
  const Patterns sum{0x4000, 0x4049, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0x7fc0, 0x0000};
  for (std::uint64_t tensor = 0; tensor < 1000; ++tensor) {
    std::vector<std::byte> memory = packed(into, DType::bf16);
    const std::vector<std::byte> source = packed(from, DType::bf16);
    const Run run{.count = into.size(), .tensor = tensor};
    plain_backend().accumulate_stochastic({source.data(), from.size(), DType::bf16},
                                          {memory.data(), into.size(), DType::bf16}, {&run, 1}, place);
    REQUIRE(unpacked(memory, DType::bf16) == sum);
  }
}

}  // namespace ballast::kernels

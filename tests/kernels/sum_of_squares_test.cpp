#include <algorithm>
#include <bit>

#include "kernels/state_math.h"
#include "tests/kernels/device_backends.h"
#include "tests/kernels/number_reference.h"

namespace ballast::kernels {
namespace {

// Computes the sum by definition: eight lanes for each group of 128, then the lanes in halves, then the groups exactly.
ExactSum defined_sum(const Patterns& patterns, DType dtype) {
  ExactSum sum;
  for (std::size_t first = 0; first < patterns.size(); first += group_size) {
    double lanes[8]{};
    for (std::size_t i = first; i < std::min(first + group_size, patterns.size()); ++i) {
      const double x = value_of(dtype, patterns[i]);
      lanes[i % 8] = std::fma(x, x, lanes[i % 8]);
    }
    for (const std::size_t half : {4u, 2u, 1u}) {
      for (std::size_t i = 0; i < half; ++i) {
        lanes[i] += lanes[i + half];
      }
    }
    add(sum, lanes[0]);
  }
  carry(sum);
  return sum;
}

ExactSum sum_on(TestBackend& on, const Patterns& patterns, DType dtype, std::size_t offset = 0) {
  const Placed values(on, patterns, dtype, offset);
  const PlacedValue<ExactSum> sum(on, {});
  on.kernels().sum_of_squares(values.view(), sum.get());
  return sum.read();
}

void check_sum_of(TestBackend& on, std::size_t count) {
  for (const DType dtype : floating_dtypes) {
    for (const Patterns& patterns : {finite_patterns(dtype, count, 1), any_patterns(dtype, count, 2)}) {
      if (!(sum_on(on, patterns, dtype, count % 7) == defined_sum(patterns, dtype))) {
        FAIL("the sum of " << count << " squares of " << name(dtype));
      }
    }
  }
}

void squares_of_few(TestBackend& on) {
  for (std::size_t count = 0; count <= 1100; count += on.every(11)) {
    check_sum_of(on, count);
  }
}

void squares_of_many(TestBackend& on) {
  check_sum_of(on, 65'536);
  check_sum_of(on, 300'001);
}

void any_cut_gives_the_same(TestBackend& on) {
  const Patterns patterns = finite_patterns(DType::bf16, 300'001, 3);
  const ExactSum whole = sum_on(on, patterns, DType::bf16);
  const Placed values(on, patterns, DType::bf16);
  for (const std::size_t groups : {1u, 3u, 100u, 1'000u, 2'000u}) {
    const PlacedValue<ExactSum> sum(on, {});
    const std::size_t step = groups * group_size;
    for (std::size_t last = (patterns.size() - 1) / step + 1; last > 0; --last) {  // the last part comes first
      const std::size_t first = (last - 1) * step;
      on.kernels().sum_of_squares(values.view().part(first, std::min(step, patterns.size() - first)), sum.get());
    }
    CHECK(sum.read() == whole);
  }
}

void formats_agree(TestBackend& on) {
  for (const DType half : {DType::bf16, DType::fp16}) {
    const Patterns patterns = finite_patterns(half, 10'000, 4);
    Patterns wide(patterns.size());
    std::ranges::transform(patterns, wide.begin(), [half](std::uint32_t pattern) {
      return std::bit_cast<std::uint32_t>(static_cast<float>(value_of(half, pattern)));
    });
    CHECK(sum_on(on, patterns, half) == sum_on(on, wide, DType::fp32));
  }
}

// A sum that makes its squares has the bits of one without, and its squares those of sum_of_squares() of the result.
template <class Sum>
void check_squares_of(TestBackend& on, const Patterns& before, DType dtype, const Sum& sum) {
  const Placed alone(on, before, dtype), together(on, before, dtype);
  const PlacedValue<ExactSum> expected(on, {.bins = {7}}), squares(on, {.bins = {7}});
  sum(alone.view(), nullptr);
  on.kernels().sum_of_squares(alone.view(), expected.get());
  sum(together.view(), squares.get());
  CAPTURE(before.size(), name(dtype));
  CHECK(together.read() == alone.read());
  CHECK(squares.read() == expected.read());
}

void check_squares_of_sums(TestBackend& on, std::size_t count, std::size_t arrays, bool has_any) {
  const auto patterns = has_any ? any_patterns : finite_patterns;
  for (const DType from : floating_dtypes) {
    std::vector<Placed> sources;
    for (std::size_t i = 0; i < arrays; ++i)
      sources.emplace_back(on, patterns(from, count, static_cast<std::uint32_t>(i)), from, i % 3);
    std::vector<ConstView> views;
    for (const Placed& source : sources)
      views.push_back(source.view());
    for (const DType into : floating_dtypes) {
      for (const bool continues : {false, true}) {
        if (arrays > Summands::most && into != DType::fp32) continue;
        check_squares_of(on, patterns(into, count, 9), into, [&](const View& target, ExactSum* squares) {
          on.kernels().sum(views, target, continues, squares);
        });
      }
    }
  }
}

void squares_of_sums(TestBackend& on) {
  for (std::size_t count = 0; count <= 1100; count += on.every(37)) {
    check_squares_of_sums(on, count, 1 + count % 3, count % 2 == 0);
  }
  check_squares_of_sums(on, 300, Summands::most + 3, false);
}

void squares_of_long_sums(TestBackend& on) { check_squares_of_sums(on, 200'003, 2, false); }

// Padding between runs is zero in all arrays of gradients.
void squares_of_stochastic_sums(TestBackend& on) {
  for (const std::size_t count : {0u, 1u, 127u, 128u, 1'000u, 200'003u}) {
    Patterns from = finite_patterns(DType::bf16, 128 + count, 1), into = finite_patterns(DType::bf16, 128 + count, 2);
    std::fill_n(from.begin() + 60, 68, 0u);
    std::fill_n(into.begin() + 60, 68, 0u);
    const Placed source(on, from, DType::bf16);
    const std::vector<Run> runs{{.count = 60}, {.begin = 128, .count = count, .tensor = 1, .tensor_begin = 128}};
    check_squares_of(on, into, DType::bf16, [&](const View& target, ExactSum* squares) {
      on.kernels().accumulate_stochastic(source.view(), target, runs, {.stream = 5}, squares);
    });
  }
}

void extremes(TestBackend& on) {
  CHECK(value(sum_on(on, Patterns(1, 1u), DType::fp32)) == 0x1p-298);
  CHECK(value(sum_on(on, Patterns(1 << 20, 1u), DType::fp32)) == 0x1p-278);
  const auto largest = static_cast<double>(std::numeric_limits<float>::max());
  CHECK(value(sum_on(on, Patterns(1 << 20, 0x7f7fffffu), DType::fp32)) == largest * largest * 0x1p20);
  Patterns patterns(1000, 0x3f800000u);
  patterns[999] = 0xff800000u;
  CHECK(value(sum_on(on, patterns, DType::fp32)) == std::numeric_limits<double>::infinity());
  patterns[0] = 0x7f800001u;
  CHECK(std::isnan(value(sum_on(on, patterns, DType::fp32))));
}

}  // namespace

TEST_CASE("sums of 0 to 1,100 squares follow their definition") { on_every_isa(squares_of_few); }
TEST_CASE("sums of squares have the same bits from any number of threads") { on_every_cpu(squares_of_many); }
TEST_CASE("sums of squares have the same bits for any split of the array") { on_every_cpu(any_cut_gives_the_same); }
TEST_CASE("sums of squares do not depend on the format of the same values") { on_every_isa(formats_agree); }
TEST_CASE("sums of the smallest and largest squares are exact, and those of infinities and NaNs are too") {
  on_every_isa(extremes);
}

TEST_CASE("a sum makes the squares of its result in the same pass") {
  for (auto* const test : {squares_of_sums, squares_of_stochastic_sums})
    on_every_isa(test);
  for (auto* const test : {squares_of_long_sums, squares_of_stochastic_sums})
    on_every_cpu(test);
}

TEST_CASE("CUDA's threads sum squares as the CPU does") {
  for (auto* const test : {squares_of_few, squares_of_many, any_cut_gives_the_same, formats_agree, extremes,
                           squares_of_sums, squares_of_long_sums, squares_of_stochastic_sums}) {
    on_octets(test);
  }
}
TEST_CASE("CUDA sums squares as the CPU does", "[gpu]") {
  for (auto* const test : {squares_of_few, squares_of_many, any_cut_gives_the_same, formats_agree, extremes,
                           squares_of_sums, squares_of_long_sums, squares_of_stochastic_sums}) {
    on_cuda(test);
  }
}

TEST_CASE("a sum of squares is within 2^-46 of the true one") {
  const Patterns patterns = finite_patterns(DType::fp32, 100'000, 5);
  long double sum = 0;
  for (const std::uint32_t pattern : patterns) {
    const long double x = value_of(DType::fp32, pattern);
    sum += x * x;
  }
  const long double got = value(defined_sum(patterns, DType::fp32));
  CHECK(std::abs(got / sum - 1) < 0x1p-46L);
}

}  // namespace ballast::kernels

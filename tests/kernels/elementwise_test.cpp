// Tests of clear, accumulate and sum.
#include "tests/kernels/device_backends.h"
#include "tests/kernels/number_reference.h"
#include "tests/sanitizer.h"

namespace ballast::kernels {
namespace {

void check_clear_of(TestBackend& on, std::size_t count, std::size_t offset) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16, DType::u8}) {
    const Placed target(on, Patterns(count, 0x34), dtype, offset);
    on.kernels().clear(target.view());
    if (target.read() != Patterns(count)) FAIL(count << " elements of " << name(dtype));
  }
}

void clears_of_few(TestBackend& on) {
  for (std::size_t count = 0; count <= 1100; count += on.every(11)) {
    check_clear_of(on, count, count % 5);
  }
}

void clears_of_many(TestBackend& on) {
  check_clear_of(on, 200'003, 1);
  check_clear_of(on, 1'100'000, 0);
}

Patterns accumulate_on(TestBackend& on, const Patterns& from, DType dtype, const Patterns& into, DType into_dtype) {
  const Placed source(on, from, dtype, from.size() % 3);
  const Placed target(on, into, into_dtype, into.size() % 5);
  on.kernels().accumulate(source.view(), target.view());
  return target.read();
}

Patterns plain_accumulate(const Patterns& from, DType dtype, const Patterns& into, DType into_dtype) {
  const std::vector<std::byte> source = packed(from, dtype);
  std::vector<std::byte> target = packed(into, into_dtype);
  plain_backend().accumulate({source.data(), from.size(), dtype}, {target.data(), into.size(), into_dtype});
  return unpacked(target, into_dtype);
}

void check_accumulate_of(TestBackend& on, std::size_t count) {
  for (const DType from : floating_dtypes) {
    for (const DType into : floating_dtypes) {
      const Patterns source = any_patterns(from, count, 1);
      const Patterns target = any_patterns(into, count, 2);
      if (accumulate_on(on, source, from, target, into) != plain_accumulate(source, from, target, into)) {
        FAIL("other bits than scalar code: " << count << " elements of " << name(from) << " into " << name(into));
      }
    }
  }
}

void sums_of_few(TestBackend& on) {
  for (std::size_t count = 0; count <= 1100; count += on.every(11)) {
    check_accumulate_of(on, count);
  }
}

void sums_of_many(TestBackend& on) { check_accumulate_of(on, 200'003); }

Patterns sum_of_one_on(TestBackend& on, const Patterns& from, DType dtype, DType into_dtype) {
  const Placed source(on, from, dtype, from.size() % 3);
  const Placed target(on, Patterns(from.size(), 0x1234), into_dtype, from.size() % 5);
  const std::vector<ConstView> views{source.view()};
  on.kernels().sum(views, target.view());
  return target.read();
}

Patterns accumulate_on_zeros(const Patterns& from, DType dtype, DType into_dtype) {
  const std::vector<std::byte> source = packed(from, dtype);
  std::vector<std::byte> target = packed(Patterns(from.size()), into_dtype);
  plain_backend().accumulate({source.data(), from.size(), dtype}, {target.data(), from.size(), into_dtype});
  return unpacked(target, into_dtype);
}

void check_sum_of_one(TestBackend& on, std::size_t count, DType into) {
  for (const DType from : floating_dtypes) {
    const Patterns source = any_patterns(from, count, 5);
    if (sum_of_one_on(on, source, from, into) != accumulate_on_zeros(source, from, into)) {
      FAIL("other bits than sums with zero: " << count << " elements of " << name(from) << " in " << name(into));
    }
  }
}

void check_sum_of_one(TestBackend& on, std::size_t count) {
  for (const DType into : floating_dtypes) {
    check_sum_of_one(on, count, into);
  }
}

void sums_of_one_short_array(TestBackend& on) {
  for (std::size_t count = 0; count <= 1100; count += on.every(11)) {
    check_sum_of_one(on, count);
  }
}

void sums_of_one_long_array(TestBackend& on) {
  check_sum_of_one(on, 200'003);
  check_sum_of_one(on, 1'100'000, DType::fp32);  // past the caches
}

// Arrays at different alignments, more than a walk takes at once among them.
void check_sum_of(TestBackend& on, std::size_t count, DType dtype, std::size_t arrays) {
  std::vector<Placed> sources;
  std::vector<ConstView> views;
  std::vector<std::byte> expected(count * sizeof(float));
  const View sum(expected.data(), count, DType::fp32);
  sources.reserve(arrays);
  for (std::size_t array = 0; array < arrays; ++array) {
    const Patterns patterns = any_patterns(dtype, count, static_cast<std::uint32_t>(7 + array));
    const std::vector<std::byte> plain = packed(patterns, dtype);
    const ConstView source(plain.data(), count, dtype);
    plain_backend().accumulate(source, sum);
    sources.emplace_back(on, patterns, dtype, count % 7 == 0 ? array % 3 : 0);
    views.push_back(sources.back().view());
  }
  const Placed target(on, Patterns(count, 0x1234), DType::fp32, count % 5);
  on.kernels().sum(views, target.view());
  if (target.read() != unpacked(expected, DType::fp32)) {
    FAIL("other bits than sums one by one: " << arrays << " x " << count << " elements of " << name(dtype));
  }
}

void sums_of_few_arrays(TestBackend& on) {
  for (std::size_t count = 0; count <= 1100; count += on.every(11)) {
    check_sum_of(on, count, floating_dtypes[count % 3], 1 + count % 9);
  }
  for (const DType dtype : floating_dtypes) {
    check_sum_of(on, 777, dtype, 8);
    check_sum_of(on, 1024, dtype, 8);
    check_sum_of(on, 300, dtype, 70);
  }
}

void sums_of_long_arrays(TestBackend& on) {
  check_sum_of(on, 200'003, DType::bf16, 3);
  check_sum_of(on, 1'100'000, DType::bf16, 2);  // past the caches
  check_sum_of(on, testing::sanitized ? 110'000 : 1'100'000, DType::fp32, 35);
}

bool is_rounded_sum(double exact_in_fp32, DType into, std::uint32_t result) {
  return std::isnan(exact_in_fp32) ? std::isnan(value_of(into, result))
                                   : result == nearest_pattern(into, exact_in_fp32);
}

}  // namespace

TEST_CASE("clears of 0 to 1,100 elements set exactly those, aligned or not") { on_every_isa(clears_of_few); }
TEST_CASE("clears reach all elements from any number of threads") { on_every_cpu(clears_of_many); }
TEST_CASE("sums of 0 to 1,100 elements give the same bits on every instruction set") { on_every_isa(sums_of_few); }
TEST_CASE("sums give the same bits from any number of threads") { on_every_cpu(sums_of_many); }
TEST_CASE("a sum of one array has the bits of an accumulation on zeros, on every instruction set") {
  on_every_isa(sums_of_one_short_array);
}
TEST_CASE("a sum of one array has the same bits from any number of threads") { on_every_cpu(sums_of_one_long_array); }

TEST_CASE("a sum of arrays has the bits of sums one by one, on every instruction set") {
  on_every_isa(sums_of_few_arrays);
}
TEST_CASE("a sum of long arrays has the same bits from any number of threads") { on_every_cpu(sums_of_long_arrays); }

TEST_CASE("CUDA's threads accumulate as the CPU does") {
  for (auto* const test : {sums_of_few, sums_of_many, sums_of_one_short_array, sums_of_few_arrays}) {
    on_octets(test);
  }
}
TEST_CASE("CUDA clears and accumulates as the CPU does", "[gpu]") {
  for (auto* const test : {clears_of_few, clears_of_many, sums_of_few, sums_of_many, sums_of_one_short_array,
                           sums_of_one_long_array, sums_of_few_arrays, sums_of_long_arrays}) {
    on_cuda(test);
  }
}

TEST_CASE("accumulate is one addition in fp32, rounded to the target's format") {
  for (const DType from : floating_dtypes) {
    for (const DType into : floating_dtypes) {
      const Patterns source = any_patterns(from, 100'000, 3);
      const Patterns target = any_patterns(into, source.size(), 4);
      const Patterns result = plain_accumulate(source, from, target, into);
      for (std::size_t i = 0; i < source.size(); ++i) {
        const float sum = static_cast<float>(value_of(from, source[i])) + static_cast<float>(value_of(into, target[i]));
        if (!is_rounded_sum(static_cast<double>(sum), into, result[i])) {
          FAIL(name(from) << " " << source[i] << " into " << name(into) << " " << target[i] << " gave " << result[i]);
        }
      }
    }
  }
}

}  // namespace ballast::kernels

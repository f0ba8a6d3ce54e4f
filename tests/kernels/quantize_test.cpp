#include <bit>

#include "tests/kernels/device_backends.h"
#include "tests/kernels/number_reference.h"
#include "tests/sanitizer.h"

namespace ballast::kernels {
namespace {

struct Result {
  Patterns codes;
  Patterns scales;
  friend bool operator==(const Result&, const Result&) = default;
};

constexpr CodeBits both_sizes[] = {CodeBits::eight, CodeBits::four};
constexpr CodeRounding nearest{};
constexpr CodeRounding stochastic{.stochastic = true, .stream = 42, .first_index = 128 * 1'000};

Result quantize_on(TestBackend& on, const Patterns& patterns, DType dtype, CodeBits bits,
                   const CodeRounding& rounding) {
  const std::size_t count = patterns.size();
  const Placed values(on, patterns, dtype, count % 3);
  const Placed codes(on, Patterns(code_bytes(count, bits), 0xee), DType::u8, count % 5);
  const Placed scales(on, Patterns(scale_count(count), 0xeeeeeeee), DType::fp32, count % 2);
  on.kernels().quantize(values.view(), {bits, codes.view(), scales.view()}, rounding);
  return {codes.read(), scales.read()};
}

Result plain_quantize(const Patterns& patterns, DType dtype, CodeBits bits, const CodeRounding& rounding) {
  const std::size_t count = patterns.size();
  const std::vector<std::byte> values = packed(patterns, dtype);
  std::vector<std::byte> codes(code_bytes(count, bits));
  std::vector<std::byte> scales(4 * scale_count(count));
  plain_backend().quantize(
      {values.data(), count, dtype},
      {bits, {codes.data(), codes.size(), DType::u8}, {scales.data(), scales.size() / 4, DType::fp32}}, rounding);
  return {unpacked(codes, DType::u8), unpacked(scales, DType::fp32)};
}

Patterns dequantize_on(TestBackend& on, const Result& quantized, CodeBits bits, std::size_t count, DType dtype,
                       std::size_t offset = 1) {
  const Placed codes(on, quantized.codes, DType::u8, count % 5);
  const Placed scales(on, quantized.scales, DType::fp32);
  const Placed values(on, Patterns(count), dtype, offset);
  on.kernels().dequantize({bits, codes.view(), scales.view()}, values.view());
  return values.read();
}

// Returns the i-th code, read by definition.
int code_at(const Result& quantized, CodeBits bits, std::size_t i) {
  if (bits == CodeBits::eight) {
    return static_cast<std::int8_t>(quantized.codes[i]);
  }
  const std::uint32_t code = quantized.codes[i / 2] >> (4 * (i % 2)) & 0xf;
  return code < 8 ? static_cast<int>(code) : static_cast<int>(code) - 16;
}

double scale_at(const Result& quantized, std::size_t i) {
  return static_cast<double>(std::bit_cast<float>(quantized.scales[i / group_size]));
}

void check_values(TestBackend& on, const Result& quantized, CodeBits bits, std::size_t count) {
  for (const DType dtype : floating_dtypes) {
    const Patterns values = dequantize_on(on, quantized, bits, count, dtype, count % 3);
    for (std::size_t i = 0; i < count; ++i) {
      const auto code = static_cast<float>(code_at(quantized, bits, i));
      const float worth = code * static_cast<float>(scale_at(quantized, i));
      const bool right = std::isnan(worth) ? std::isnan(value_of(dtype, values[i]))
                                           : value_of(dtype, values[i]) ==
                                                 value_of(dtype, nearest_pattern(dtype, static_cast<double>(worth)));
      if (!right) {
        FAIL("element " << i << " of " << count << ", as " << name(dtype) << ", is " << value_of(dtype, values[i]));
      }
    }
  }
}

void check_quantize_of(TestBackend& on, std::size_t count) {
  for (const CodeBits bits : both_sizes) {
    for (const CodeRounding& rounding : {nearest, stochastic}) {
      const DType dtype = floating_dtypes[count % 3];
      const Patterns patterns = count % 2 == 0 ? finite_patterns(dtype, count, 1) : any_patterns(dtype, count, 2);
      const Result result = quantize_on(on, patterns, dtype, bits, rounding);
      if (!(result == plain_quantize(patterns, dtype, bits, rounding))) {
        FAIL("other bits than scalar code: " << count << " elements of " << name(dtype));
      }
      check_values(on, result, bits, count);
    }
  }
}

void few(TestBackend& on) {
  for (std::size_t count = 0; count <= 1100; count += testing::every(11)) {
    check_quantize_of(on, count);
  }
}

void many(TestBackend& on) {
  check_quantize_of(on, 150'000);
  check_quantize_of(on, 150'001);
}

void errors_are_bounded(TestBackend& on) {
  for (const CodeBits bits : both_sizes) {
    for (const DType dtype : floating_dtypes) {
      const Patterns patterns = finite_patterns(dtype, 100'000, 7);
      const Result near = quantize_on(on, patterns, dtype, bits, nearest);
      const Result random = quantize_on(on, patterns, dtype, bits, stochastic);
      for (std::size_t i = 0; i < patterns.size(); ++i) {
        const double x = value_of(dtype, patterns[i]);
        const double scale = scale_at(near, i);
        const double error = std::abs(code_at(near, bits, i) * scale - x);
        const double random_error = std::abs(code_at(random, bits, i) * scale - x);
        if (error > scale / 2 * (1 + 0x1p-14) || random_error > scale * (1 + 0x1p-13)) {
          FAIL("element " << i << ", " << x << ", is " << error / scale << " or " << random_error / scale
                          << " steps off");
        }
      }
    }
  }
}

Patterns fp32_patterns(const std::vector<float>& values) {
  Patterns patterns;
  for (const float x : values) {
    patterns.push_back(std::bit_cast<std::uint32_t>(x));
  }
  return patterns;
}

void special_groups(TestBackend& on) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const CodeBits bits : both_sizes) {
    for (const CodeRounding& rounding : {nearest, stochastic}) {
      std::vector<float> values(5 * group_size, 1.0f);
      std::fill_n(values.begin(), group_size, 0.0f);
      values[group_size + 5] = std::nanf("");
      values[2 * group_size + 127] = -inf;
      std::fill_n(values.begin() + 3 * group_size, group_size, 0x1.fffffep-120f);  // just too small
      values[3 * group_size] = 1e-40f;
      std::fill_n(values.begin() + 4 * group_size, group_size, 0x1p-119f);
      const Result result = quantize_on(on, fp32_patterns(values), DType::fp32, bits, rounding);
      CHECK(result.scales[0] == 0);
      CHECK(result.scales[1] == 0x7fc00000u);
      CHECK(result.scales[2] == 0x7fc00000u);
      CHECK(result.scales[3] == 0);
      CHECK(scale_at(result, 4 * group_size) == Approx(0x1p-119 / largest_code(bits)));
      const Patterns back = dequantize_on(on, result, bits, values.size(), DType::fp32);
      CHECK(std::all_of(back.begin(), back.begin() + group_size, [](auto pattern) { return pattern == 0; }));
      CHECK(std::all_of(back.begin() + group_size, back.begin() + 3 * group_size,
                        [](auto pattern) { return pattern == 0x7fc00000u; }));
      CHECK(std::all_of(back.begin() + 3 * group_size, back.begin() + 4 * group_size,
                        [](auto pattern) { return pattern == 0; }));
      CHECK(code_at(result, bits, 4 * group_size) == largest_code(bits));
    }
  }
}

// Large enough to be written past the caches if the target is aligned.
void very_many(TestBackend& on) {
  const std::size_t count = 1'100'001;
  const Result result = quantize_on(on, finite_patterns(DType::fp32, count, 9), DType::fp32, CodeBits::four, nearest);
  const Patterns values = dequantize_on(on, result, CodeBits::four, count, DType::fp32, 0);
  CHECK(dequantize_on(on, result, CodeBits::four, count, DType::fp32, 1) == values);
  for (std::size_t i = 0; i < count; ++i) {
    const double worth = code_at(result, CodeBits::four, i) * scale_at(result, i);
    if (value_of(DType::fp32, values[i]) != static_cast<double>(static_cast<float>(worth))) {
      FAIL("element " << i << " is " << value_of(DType::fp32, values[i]) << ", not " << worth);
    }
  }
}

// The largest finite number keeps its code, and whole numbers of steps are kept exactly, with either rounding.
void exact_values(TestBackend& on) {
  for (const CodeBits bits : both_sizes) {
    for (const CodeRounding& rounding : {nearest, stochastic}) {
      for (const float scale : {1.0f, 0x1p-60f, 0x1p120f}) {
        std::vector<float> values;
        for (int i = 0; i < static_cast<int>(group_size); ++i) {
          values.push_back(static_cast<float>(largest_code(bits) - i % (2 * largest_code(bits) + 1)) * scale);
        }
        const Result result = quantize_on(on, fp32_patterns(values), DType::fp32, bits, rounding);
        CHECK(dequantize_on(on, result, bits, values.size(), DType::fp32) == fp32_patterns(values));
      }
      const Patterns largest(group_size, 0xff7fffffu);
      CHECK(code_at(quantize_on(on, largest, DType::fp32, bits, rounding), bits, 0) == -largest_code(bits));
    }
  }
}

void parts_give_the_same(TestBackend& on) {
  const Patterns patterns = finite_patterns(DType::fp32, 100'000, 8);
  for (const CodeBits bits : both_sizes) {
    const Result whole = quantize_on(on, patterns, DType::fp32, bits, stochastic);
    Result parts;
    for (std::size_t first = 0; first < patterns.size(); first += 37 * group_size) {
      const auto begin = patterns.begin() + static_cast<std::ptrdiff_t>(first);
      const auto count = std::min<std::ptrdiff_t>(37 * group_size, patterns.end() - begin);
      CodeRounding rounding = stochastic;
      rounding.first_index += first;
      const Result part = quantize_on(on, {begin, begin + count}, DType::fp32, bits, rounding);
      parts.codes.insert(parts.codes.end(), part.codes.begin(), part.codes.end());
      parts.scales.insert(parts.scales.end(), part.scales.begin(), part.scales.end());
    }
    CHECK(parts == whole);
  }
}

}  // namespace

TEST_CASE("0 to 1,100 values are quantized to the same bits on every instruction set") { on_every_isa(few); }
TEST_CASE("values are quantized to the same bits by any number of threads") { on_every_cpu(many); }
TEST_CASE("arrays larger than the caches are dequantized to the same bits") { on_every_isa(very_many); }
TEST_CASE("a quantized value is within half a step, a stochastic one within a step") {
  on_every_isa(errors_are_bounded);
}
TEST_CASE("groups of zeros, of the smallest values, or with NaN or infinity have their defined codes") {
  on_every_isa(special_groups);
}
TEST_CASE("multiples of the step are quantized exactly") { on_every_isa(exact_values); }
TEST_CASE("stochastic codes do not depend on where an array is cut") { on_every_isa(parts_give_the_same); }

TEST_CASE("CUDA's threads quantize as the CPU does") {
  for (auto* const test : {few, many, errors_are_bounded, special_groups, exact_values, parts_give_the_same}) {
    on_octets(test);
  }
}
TEST_CASE("CUDA quantizes as the CPU does", "[gpu]") {
  for (auto* const test :
       {few, many, very_many, errors_are_bounded, special_groups, exact_values, parts_give_the_same}) {
    on_cuda(test);
  }
}

TEST_CASE("stochastic codes are unbiased") {
  constexpr std::size_t count = 128 * 4'000;
  std::vector<float> values(count, 0.3f);
  for (std::size_t i = 0; i < count; i += group_size) {
    values[i] = 7.0f;  // so that a step is 1 with 4 bits
  }
  const Result result = plain_quantize(fp32_patterns(values), DType::fp32, CodeBits::four, stochastic);
  double sum = 0;
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const int code = code_at(result, CodeBits::four, i);
    const bool right = i % group_size == 0 ? code == 7 : code == 0 || code == 1;
    wrong += right ? 0 : 1;
    sum += i % group_size == 0 ? 0 : code;
  }
  CHECK(wrong == 0);
  CHECK(sum / (count / group_size * (group_size - 1)) == Approx(0.3).margin(0.003));
}

TEST_CASE("codes of 4 bits lie two in a byte, the first in the low half") {
  const Patterns patterns = fp32_patterns({7.0f, -7.0f, 1.0f, -1.0f, 3.0f});
  CHECK(plain_quantize(patterns, DType::fp32, CodeBits::four, nearest).codes == Patterns{0x97, 0xf1, 0x03});
}

}  // namespace ballast::kernels

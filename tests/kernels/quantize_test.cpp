#include <bit>

#include "tests/kernels/device_backends.h"
#include "tests/kernels/number_reference.h"

namespace ballast::kernels {
namespace {

constexpr CodeBits both_sizes[] = {CodeBits::eight, CodeBits::four};
constexpr CodeRounding nearest{};
constexpr CodeRounding stochastic{.stochastic = true, .stream = 42, .first_index = 128 * 1'000};

// All bytes of the blocks.
Patterns quantize_on(TestBackend& on, const Patterns& patterns, DType dtype, CodeBits bits,
                     const CodeRounding& rounding) {
  const std::size_t count = patterns.size();
  const Placed values(on, patterns, dtype, count % 3);
  const Placed blocks(on, Patterns(quantized_bytes(count, bits), 0xee), DType::u8, count % 5 * scale_bytes);
  on.kernels().quantize(values.view(), {bits, blocks.view()}, rounding);
  return blocks.read();
}

Patterns plain_quantize(const Patterns& patterns, DType dtype, CodeBits bits, const CodeRounding& rounding) {
  const std::size_t count = patterns.size();
  const std::vector<std::byte> values = packed(patterns, dtype);
  std::vector<std::byte> blocks(quantized_bytes(count, bits));
  plain_backend().quantize({values.data(), count, dtype}, {bits, {blocks.data(), blocks.size(), DType::u8}}, rounding);
  return unpacked(blocks, DType::u8);
}

Patterns dequantize_on(TestBackend& on, const Patterns& quantized, CodeBits bits, std::size_t count, DType dtype,
                       std::size_t offset = 1) {
  const Placed blocks(on, quantized, DType::u8, count % 5 * scale_bytes);
  const Placed values(on, Patterns(count), dtype, offset);
  on.kernels().dequantize({bits, blocks.view()}, values.view());
  return values.read();
}

// Returns the i-th code, read by definition.
int code_at(const Patterns& blocks, CodeBits bits, std::size_t i) {
  const std::size_t codes = i / group_size * block_bytes(bits) + scale_bytes;
  if (bits == CodeBits::eight) return static_cast<std::int8_t>(blocks[codes + i % group_size]);
  const std::uint32_t code = blocks[codes + i % group_size / 2] >> (4 * (i % 2)) & 0xf;
  return code < 8 ? static_cast<int>(code) : static_cast<int>(code) - 16;
}

// Returns the pattern of the scale of the i-th value.
std::uint32_t scale_pattern_at(const Patterns& blocks, CodeBits bits, std::size_t i) {
  std::uint32_t pattern = 0;
  for (std::size_t byte = 0; byte < scale_bytes; ++byte) {
    pattern |= blocks[i / group_size * block_bytes(bits) + byte] << (8 * byte);
  }
  return pattern;
}

double scale_at(const Patterns& blocks, CodeBits bits, std::size_t i) {
  return static_cast<double>(std::bit_cast<float>(scale_pattern_at(blocks, bits, i)));
}

void check_values(TestBackend& on, const Patterns& quantized, CodeBits bits, std::size_t count) {
  for (const DType dtype : floating_dtypes) {
    const Patterns values = dequantize_on(on, quantized, bits, count, dtype, count % 3);
    for (std::size_t i = 0; i < count; ++i) {
      const auto code = static_cast<float>(code_at(quantized, bits, i));
      const float worth = code * static_cast<float>(scale_at(quantized, bits, i));
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
      const Patterns result = quantize_on(on, patterns, dtype, bits, rounding);
      if (!(result == plain_quantize(patterns, dtype, bits, rounding))) {
        FAIL("other bits than scalar code: " << count << " elements of " << name(dtype));
      }
      check_values(on, result, bits, count);
    }
  }
}

void few(TestBackend& on) {
  for (std::size_t count = 0; count <= 1100; count += on.every(11)) {
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
      const Patterns near = quantize_on(on, patterns, dtype, bits, nearest);
      const Patterns random = quantize_on(on, patterns, dtype, bits, stochastic);
      for (std::size_t i = 0; i < patterns.size(); ++i) {
        const double x = value_of(dtype, patterns[i]);
        const double scale = scale_at(near, bits, i);
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
      std::fill_n(values.begin() + 3 * group_size, group_size, 0x1.fffffep-120f);  // the values are just too small
      values[3 * group_size] = 1e-40f;
      std::fill_n(values.begin() + 4 * group_size, group_size, 0x1p-119f);
      const Patterns result = quantize_on(on, fp32_patterns(values), DType::fp32, bits, rounding);
      CHECK(scale_pattern_at(result, bits, 0) == 0);
      CHECK(scale_pattern_at(result, bits, group_size) == 0x7fc00000u);
      CHECK(scale_pattern_at(result, bits, 2 * group_size) == 0x7fc00000u);
      CHECK(scale_pattern_at(result, bits, 3 * group_size) == 0);
      CHECK(scale_at(result, bits, 4 * group_size) == Approx(0x1p-119 / largest_code(bits)));
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
  const Patterns result = quantize_on(on, finite_patterns(DType::fp32, count, 9), DType::fp32, CodeBits::four, nearest);
  const Patterns values = dequantize_on(on, result, CodeBits::four, count, DType::fp32, 0);
  CHECK(dequantize_on(on, result, CodeBits::four, count, DType::fp32, 1) == values);
  for (std::size_t i = 0; i < count; ++i) {
    const double worth = code_at(result, CodeBits::four, i) * scale_at(result, CodeBits::four, i);
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
        const Patterns result = quantize_on(on, fp32_patterns(values), DType::fp32, bits, rounding);
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
    const Patterns whole = quantize_on(on, patterns, DType::fp32, bits, stochastic);
    Patterns parts;
    for (std::size_t first = 0; first < patterns.size(); first += 37 * group_size) {
      const auto begin = patterns.begin() + static_cast<std::ptrdiff_t>(first);
      const auto count = std::min<std::ptrdiff_t>(37 * group_size, patterns.end() - begin);
      CodeRounding rounding = stochastic;
      rounding.first_index += first;
      const Patterns part = quantize_on(on, {begin, begin + count}, DType::fp32, bits, rounding);
      parts.insert(parts.end(), part.begin(), part.end());
    }
    CHECK(parts == whole);
  }
}

// The sum of arrays one by one: each is dequantized in fp32, and added to a sum that begins at zero.
Patterns sum_by_definition(const std::vector<Patterns>& arrays, CodeBits bits, std::size_t count, DType into) {
  std::vector<float> sums(count), values(count);
  const View sum(reinterpret_cast<std::byte*>(sums.data()), count, DType::fp32);
  const View value(reinterpret_cast<std::byte*>(values.data()), count, DType::fp32);
  for (std::size_t array = 0; array < arrays.size(); ++array) {
    const std::vector<std::byte> blocks = packed(arrays[array], DType::u8);
    plain_backend().dequantize({bits, {blocks.data(), blocks.size(), DType::u8}}, value);
    plain_backend().accumulate(value, sum);
  }
  std::vector<std::byte> rounded(count * byte_size(into));
  plain_backend().cast(sum, {rounded.data(), count, into});
  return unpacked(rounded, into);
}

void check_quantized_sum_of(TestBackend& on, std::size_t count, std::size_t arrays, CodeBits bits, DType into) {
  std::vector<Patterns> quantized;
  std::vector<std::unique_ptr<Placed>> placed;
  std::vector<ConstView> views;
  for (std::size_t array = 0; array < arrays; ++array) {
    const auto seed = static_cast<std::uint32_t>(array);
    const Patterns values =
        array == 1 ? any_patterns(DType::bf16, count, seed) : finite_patterns(DType::bf16, count, seed);
    quantized.push_back(plain_quantize(values, DType::bf16, bits, stochastic));
    placed.push_back(std::make_unique<Placed>(on, quantized.back(), DType::u8, (count + array) % 5 * scale_bytes));
    views.push_back(placed.back()->view());
  }
  const Placed sum(on, Patterns(count), into, count % 3);
  on.kernels().sum_quantized(views, bits, sum.view());
  if (sum.read() != sum_by_definition(quantized, bits, count, into)) {
    FAIL("other bits than sums one by one: " << arrays << " x " << count << " elements in " << name(into));
  }
}

void quantized_sums_of_few(TestBackend& on) {
  for (std::size_t count = 0; count <= 1100; count += on.every(11)) {
    for (const CodeBits bits : both_sizes) {
      check_quantized_sum_of(on, count, 1 + count % 9, bits, floating_dtypes[count % 3]);
    }
  }
  check_quantized_sum_of(on, 777, 70, CodeBits::eight, DType::fp32);
  check_quantized_sum_of(on, 777, 70, CodeBits::four, DType::bf16);
  check_quantized_sum_of(on, 300, 140, CodeBits::four, DType::fp32);
}

void quantized_sums_of_many(TestBackend& on) {
  check_quantized_sum_of(on, 200'003, 3, CodeBits::eight, DType::bf16);
  check_quantized_sum_of(on, 200'003, 35, CodeBits::four, DType::fp32);
}

}  // namespace

TEST_CASE("quantized arrays are added with the bits of sums one by one, on every instruction set") {
  on_every_isa(quantized_sums_of_few);
}
TEST_CASE("long quantized arrays are added with the same bits by any number of threads") {
  on_every_cpu(quantized_sums_of_many);
}

TEST_CASE("a last group that is not full has a whole block, with codes of zero past its end") {
  for (const CodeBits bits : both_sizes) {
    const Patterns blocks = plain_quantize(Patterns(group_size + 3, 0x3f800000u), DType::fp32, bits, stochastic);
    CHECK(blocks.size() == 2 * block_bytes(bits));
    for (std::size_t i = 0; i < 2 * group_size; ++i) {
      if (code_at(blocks, bits, i) != (i < group_size + 3 ? largest_code(bits) : 0)) FAIL("code " << i);
    }
  }
}

TEST_CASE("blocks of 128 bf16 values have 0.516 and 0.266 of their bytes") {
  CHECK(block_bytes(CodeBits::eight) == 132);
  CHECK(block_bytes(CodeBits::four) == 68);
}

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
  for (auto* const test : {few, many, errors_are_bounded, special_groups, exact_values, parts_give_the_same,
                           quantized_sums_of_few, quantized_sums_of_many}) {
    on_octets(test);
  }
}
TEST_CASE("CUDA quantizes as the CPU does", "[gpu]") {
  for (auto* const test : {few, many, very_many, errors_are_bounded, special_groups, exact_values, parts_give_the_same,
                           quantized_sums_of_few, quantized_sums_of_many}) {
    on_cuda(test);
  }
}

TEST_CASE("stochastic codes are unbiased") {
  constexpr std::size_t count = 128 * 4'000;
  std::vector<float> values(count, 0.3f);
  for (std::size_t i = 0; i < count; i += group_size) {
    values[i] = 7.0f;  // a step is then 1 with 4 bits
  }
  const Patterns result = plain_quantize(fp32_patterns(values), DType::fp32, CodeBits::four, stochastic);
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
  const Patterns block = plain_quantize(patterns, DType::fp32, CodeBits::four, nearest);
  CHECK(Patterns(block.begin(), block.begin() + scale_bytes + 3) == Patterns{0, 0, 0x80, 0x3f, 0x97, 0xf1, 0x03});
}

}  // namespace ballast::kernels

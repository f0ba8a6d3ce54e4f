// Tests that wrong arguments are refused with the right error code.
#include "kernels/checks.h"

#include "tests/kernels/test_backends.h"

namespace ballast::kernels {
namespace {

template <class Call>
Code code_of(Call&& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.code();
  }
  FAIL("nothing was refused");
  return Code::internal;
}

alignas(64) std::byte memory[4096];

View at(std::size_t byte, std::size_t count, DType dtype) { return {memory + byte, count, dtype}; }

}  // namespace

TEST_CASE("casts refuse unsupported arguments") {
  Backend& on = plain_backend();
  const View floats = at(0, 100, DType::fp32);
  CHECK(code_of([&] { on.cast(floats, at(1024, 99, DType::bf16)); }) == Code::wrong_size);
  CHECK(code_of([&] { on.cast(floats, at(1024, 100, DType::u8)); }) == Code::wrong_dtype);
  CHECK(code_of([&] { on.cast(at(1024, 100, DType::u8), floats); }) == Code::wrong_dtype);
  CHECK(code_of([&] { on.cast(floats, at(200, 100, DType::bf16)); }) == Code::bad_argument);
  CHECK(code_of([&] { on.cast(floats, at(0, 100, DType::bf16)); }) == Code::bad_argument);
  CHECK(code_of([&] { on.cast(floats, at(1025, 100, DType::bf16)); }) == Code::unaligned);
  CHECK(code_of([&] { on.cast(floats, View{nullptr, 100, DType::bf16}); }) == Code::bad_argument);
  on.cast(at(0, 100, DType::bf16), at(0, 100, DType::fp16));    // a cast in place, elements of one size
  on.cast(at(0, 100, DType::bf16), at(200, 100, DType::fp32));  // a cast side by side
  on.cast(View{}, View{});
}

TEST_CASE("clears, sums and searches refuse unsupported arguments") {
  Backend& on = plain_backend();
  ExactSum sum;
  std::uint64_t first = no_index;
  CHECK(code_of([&] { on.clear({nullptr, 10, DType::fp32}); }) == Code::bad_argument);
  CHECK(code_of([&] { on.accumulate(at(0, 10, DType::u8), at(1024, 10, DType::fp32)); }) == Code::wrong_dtype);
  CHECK(code_of([&] { on.accumulate(at(0, 10, DType::fp32), at(1024, 10, DType::u8)); }) == Code::wrong_dtype);
  CHECK(code_of([&] { on.accumulate(at(0, 10, DType::fp32), at(1024, 11, DType::fp32)); }) == Code::wrong_size);
  CHECK(code_of([&] { on.sum_of_squares(at(0, 10, DType::u8), &sum); }) == Code::wrong_dtype);
  CHECK(code_of([&] { on.first_non_finite(at(2, 10, DType::fp32), 0, &first); }) == Code::unaligned);
}

TEST_CASE("stochastic accumulation refuses unsupported arguments") {
  Backend& on = plain_backend();
  const View from = at(0, 300, DType::bf16), into = at(1024, 300, DType::bf16);
  const auto with = [&](const ConstView& source, const View& target, std::vector<Run> runs) {
    return code_of([&] { on.accumulate_stochastic(source, target, runs, {}); });
  };
  CHECK(with(at(0, 300, DType::fp32), at(2048, 300, DType::bf16), {}) == Code::wrong_dtype);
  CHECK(with(from, at(1024, 300, DType::fp16), {}) == Code::wrong_dtype);
  CHECK(with(from, into.part(0, 299), {}) == Code::wrong_size);
  CHECK(with(from, at(2, 300, DType::bf16), {}) == Code::bad_argument);
  CHECK(with(from, into, {{.begin = 256, .count = 45}}) == Code::wrong_size);
  CHECK(with(from, into, {{.begin = 128, .count = 1}, {.begin = 0, .count = 1}}) == Code::bad_argument);
  CHECK(with(from, into, {{.begin = 64, .count = 1}}) == Code::unaligned);
  CHECK(with(from, into, {{.count = 1, .tensor_begin = 64}}) == Code::unaligned);
}

TEST_CASE("quantization refuses unsupported arguments") {
  Backend& on = plain_backend();
  const View values = at(0, 200, DType::fp32);
  const View blocks = at(1024, 264, DType::u8);
  const CodeBits eight = CodeBits::eight;
  const std::vector<ConstView> arrays{blocks, blocks};
  on.quantize(values, {eight, blocks}, {});
  on.dequantize({eight, blocks}, values);
  on.sum_quantized(arrays, eight, values);
  CHECK(code_of([&] { on.quantize(values, {CodeBits::four, blocks}, {}); }) == Code::wrong_size);
  CHECK(code_of([&] { on.quantize(values, {eight, blocks.part(0, 200)}, {}); }) == Code::wrong_size);
  CHECK(code_of([&] { on.quantize(values, {eight, values}, {}); }) == Code::wrong_dtype);
  CHECK(code_of([&] { on.quantize(blocks, {eight, blocks}, {}); }) == Code::wrong_dtype);
  CHECK(code_of([&] { on.quantize(values, {eight, at(1026, 264, DType::u8)}, {}); }) == Code::unaligned);
  CHECK(code_of([&] { on.quantize(values, {eight, blocks}, {true, 0, 1}); }) == Code::unaligned);
  CHECK(code_of([&] { on.dequantize({eight, blocks}, at(0, 300, DType::fp32)); }) == Code::wrong_size);
  CHECK(code_of([&] { on.sum_quantized({}, eight, values); }) == Code::bad_argument);
  CHECK(code_of([&] { on.sum_quantized(arrays, CodeBits::four, values); }) == Code::wrong_size);
  CHECK(code_of([&] { on.sum_quantized(arrays, eight, blocks); }) == Code::wrong_dtype);
}

}  // namespace ballast::kernels

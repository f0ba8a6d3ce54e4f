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
  const CopyPiece pieces[] = {{at(0, 10, DType::fp32), at(1024, 10, DType::fp32)}, {floats, at(1024, 99, DType::bf16)}};
  CHECK(code_of([&] { on.copy_pieces(pieces); }) == Code::wrong_size);
  on.cast(at(0, 100, DType::bf16), at(0, 100, DType::fp16));    // in place, elements of one size
  on.cast(at(0, 100, DType::bf16), at(200, 100, DType::fp32));  // side by side
  on.cast(View{}, View{});
}

TEST_CASE("fills, sums and searches refuse unsupported arguments") {
  Backend& on = plain_backend();
  ExactSum sum;
  std::uint64_t first = no_index;
  CHECK(code_of([&] { on.fill(at(0, 10, DType::u8), 0.5f); }) == Code::bad_argument);
  CHECK(code_of([&] { on.fill(at(0, 10, DType::u8), 256.0f); }) == Code::bad_argument);
  CHECK(code_of([&] { on.accumulate(at(0, 10, DType::u8), 1, at(1024, 10, DType::fp32)); }) == Code::wrong_dtype);
  CHECK(code_of([&] { on.accumulate(at(0, 10, DType::fp32), 1, at(1024, 10, DType::u8)); }) == Code::wrong_dtype);
  CHECK(code_of([&] { on.accumulate(at(0, 10, DType::fp32), 1, at(1024, 11, DType::fp32)); }) == Code::wrong_size);
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
  const View codes = at(1024, 200, DType::u8);
  const View scales = at(2048, 2, DType::fp32);
  const CodeBits eight = CodeBits::eight;
  on.quantize(values, {eight, codes, scales}, {});
  on.dequantize({eight, codes, scales}, values);
  CHECK(code_of([&] { on.quantize(values, {CodeBits::four, codes, scales}, {}); }) == Code::wrong_size);
  CHECK(code_of([&] { on.quantize(values, {eight, codes, scales.part(0, 1)}, {}); }) == Code::wrong_size);
  CHECK(code_of([&] { on.quantize(values, {eight, values, scales}, {}); }) == Code::wrong_dtype);
  CHECK(code_of([&] { on.quantize(codes, {eight, codes, scales}, {}); }) == Code::wrong_dtype);
  CHECK(code_of([&] { on.quantize(values, {eight, codes, scales}, {true, 0, 1}); }) == Code::unaligned);
  CHECK(code_of([&] { on.dequantize({eight, codes, scales}, at(0, 199, DType::fp32)); }) == Code::wrong_size);
}

}  // namespace ballast::kernels

#include <fmt/format.h>

#include "kernels/quantize.h"

#include "kernels/checks.h"

namespace ballast::kernels {
namespace {

void check_blocks(const ConstView& blocks, CodeBits bits, std::size_t count) {
  check_size(blocks, DType::u8, quantized_bytes(count, bits), "quantized values");
  require(reinterpret_cast<std::uintptr_t>(blocks.data()) % scale_bytes == 0, Code::unaligned, [] {
    return Problem{.what = "cannot use quantized values: their blocks are not aligned",
                   .needed = fmt::format("a multiple of {} bytes", scale_bytes)};
  });
}

}  // namespace

void check_quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding) {
  check_floating(from, "the source of a quantization");
  check_blocks(to.blocks, to.bits, from.count());
  require(!rounding.stochastic || rounding.first_index % group_size == 0, Code::unaligned, [&] {
    return Problem{.what = "cannot round stochastically: the first element does not begin a group",
                   .needed = fmt::format("a first index that is a multiple of {}", group_size),
                   .available = std::to_string(rounding.first_index)};
  });
}

void check_dequantize(const ConstQuantized& from, const View& to) {
  check_floating(to, "the target of a dequantization");
  check_blocks(from.blocks, from.bits, to.count());
}

void check_sum_quantized(std::span<const ConstView> from, CodeBits bits, const View& into) {
  check_floating(into, "the target of a sum of quantized values");
  require(!from.empty(), Code::bad_argument, [] {
    return Problem{.what = "cannot sum quantized arrays", .needed = "one array or more", .available = "none"};
  });
  for (const ConstView& blocks : from) {
    check_blocks(blocks, bits, into.count());
  }
}

}  // namespace ballast::kernels

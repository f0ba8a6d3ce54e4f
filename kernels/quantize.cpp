#include <fmt/format.h>

#include "kernels/quantize.h"

#include "kernels/checks.h"

namespace ballast::kernels {
namespace {

void check_memory(const ConstQuantized& quantized, std::size_t count) {
  check_size(quantized.codes, DType::u8, code_bytes(count, quantized.bits), "codes");
  check_size(quantized.scales, DType::fp32, scale_count(count), "scales");
}

}  // namespace

void check_quantize(const ConstView& from, const Quantized& to, const CodeRounding& rounding) {
  check_floating(from, "the source of a quantization");
  check_memory({to.bits, to.codes, to.scales}, from.count());
  require(!rounding.stochastic || rounding.first_index % group_size == 0, Code::unaligned, [&] {
    return Problem{.what = "cannot round stochastically: the first element does not begin a group",
                   .needed = fmt::format("a first index that is a multiple of {}", group_size),
                   .available = std::to_string(rounding.first_index)};
  });
}

void check_dequantize(const ConstQuantized& from, const View& to) {
  check_floating(to, "the target of a dequantization");
  check_memory(from, to.count());
}

}  // namespace ballast::kernels

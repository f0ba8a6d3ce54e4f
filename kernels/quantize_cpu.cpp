#include "kernels/cpu.h"
#include "kernels/pieces.h"
#include "kernels/quantize.h"

namespace ballast::kernels {

void quantize(const Cpu& cpu, const ConstView& from, const Quantized& to, const CodeRounding& rounding) {
  check_quantize(from, to, rounding);
  auto* codes = reinterpret_cast<std::uint8_t*>(to.codes.data());
  auto* scales = reinterpret_cast<float*>(to.scales.data());
  each_piece(cpu.threads, from.count(), [&](std::size_t first, std::size_t count) {
    CodeRounding here = rounding;
    here.first_index += first;
    cpu.walks.quantize(numbers(from, first, count),
                       {to.bits, codes + code_bytes(first, to.bits), scales + first / group_size}, here);
  });
}

void dequantize(const Cpu& cpu, const ConstQuantized& from, const View& to) {
  check_dequantize(from, to);
  const Stores stores = stores_for(to.bytes());
  const auto* codes = reinterpret_cast<const std::uint8_t*>(from.codes.data());
  const auto* scales = reinterpret_cast<const float*>(from.scales.data());
  each_piece(cpu.threads, to.count(), [&](std::size_t first, std::size_t count) {
    cpu.walks.dequantize({from.bits, codes + code_bytes(first, from.bits), scales + first / group_size},
                         numbers(to, first, count), stores);
  });
}

}  // namespace ballast::kernels

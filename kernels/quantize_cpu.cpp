#include "kernels/checks.h"
#include "kernels/cpu.h"
#include "kernels/pieces.h"
#include "kernels/quantize.h"
#include "kernels/summands.h"

namespace ballast::kernels {
namespace {

void sum_in_passes(const Cpu& cpu, const std::span<const ConstView> from, CodeBits bits, std::size_t first,
                   const Numbers& into) {
  each_pass(
      from, quantized_bytes(first, bits), into.count,
      [&](const Summands& arrays) {
        cpu.walks.sum_quantized({arrays, bits}, into);
      },
      arrays_in_a_pass);
}

}  // namespace

void quantize(const Cpu& cpu, const ConstView& from, const Quantized& to, const CodeRounding& rounding) {
  check_quantize(from, to, rounding);
  each_piece(cpu.threads, from.count(), [&](std::size_t first, std::size_t count) {
    CodeRounding here = rounding;
    here.first_index += first;
    cpu.walks.quantize(numbers(from, first, count), {to.bits, to.blocks.data() + quantized_bytes(first, to.bits)},
                       here);
  });
}

void dequantize(const Cpu& cpu, const ConstQuantized& from, const View& to) {
  check_dequantize(from, to);
  const Stores stores = stores_for(to.bytes());
  each_piece(cpu.threads, to.count(), [&](std::size_t first, std::size_t count) {
    cpu.walks.dequantize({from.bits, from.blocks.data() + quantized_bytes(first, from.bits)}, numbers(to, first, count),
                         stores);
  });
}

// A sum of several passes is rounded when all is added.
void sum_quantized(const Cpu& cpu, std::span<const ConstView> from, CodeBits bits, const View& into) {
  check_sum_quantized(from, bits, into);
  const bool in_one_pass = from.size() <= arrays_in_a_pass || into.dtype() == DType::fp32;
  each_piece(cpu.threads, into.count(), [&](std::size_t first, std::size_t count) {
    const Numbers target = numbers(into, first, count);
    if (in_one_pass) return sum_in_passes(cpu, from, bits, first, target);
    std::vector<float> sums(count);
    const Numbers sum{reinterpret_cast<std::byte*>(sums.data()), count, DType::fp32};
    sum_in_passes(cpu, from, bits, first, sum);
    cpu.walks.cast({sum.data, sum.count, sum.dtype}, target, Stores::cached);
  });
}

}  // namespace ballast::kernels

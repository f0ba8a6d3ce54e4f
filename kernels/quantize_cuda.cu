#include "kernels/cuda_launch.cuh"
#include "kernels/quantize_octet.h"

namespace ballast::kernels {
namespace {

__global__ void __launch_bounds__(threads_per_chunk)
    quantize_kernel(ConstNumbers from, QuantizedPiece to, CodeRounding rounding, Stretch all) {
  each_chunk(all.chunks_end, [&](std::size_t chunk) {
    const OctetPlace place = place_in(all, chunk, threadIdx.x);
    const FloatOctet floats = load_floats(from, place);
    const GroupScale scale = group_scale(max_of_group(largest_magnitude(floats)), to.bits);
    const std::uint64_t index = rounding.first_index + place.first;
    store_quantized(to, from.count, place, scale, to_codes(floats, scale, to.bits, rounding, index));
  });
}

__global__ void __launch_bounds__(threads_per_chunk)
    dequantize_kernel(ConstQuantizedPiece from, Numbers to, Stretch all) {
  each_chunk(all.chunks_end, [&](std::size_t chunk) {
    const OctetPlace place = place_in(all, chunk, threadIdx.x);
    if (place.count > 0) store_floats(to, place, load_quantized(from, place));
  });
}

__global__ void __launch_bounds__(threads_per_chunk)
    sum_quantized_kernel(const __grid_constant__ QuantizedSummands from, Numbers into, Stretch all) {
  each_chunk(all.chunks_end,
             [&](std::size_t chunk) { sum_quantized_octet(from, into, place_in(all, chunk, threadIdx.x)); });
}

}  // namespace

void quantize(const Cuda& cuda, const ConstNumbers& from, const QuantizedPiece& to, const CodeRounding& rounding) {
  const Stretch all = whole_array(from.count, is_octet_aligned(from));
  launch<quantize_kernel>(cuda, "launching a quantization", all.chunks_end, from, to, rounding, all);
}

void dequantize(const Cuda& cuda, const ConstQuantizedPiece& from, const Numbers& to) {
  const Stretch all = whole_array(to.count, is_octet_aligned(to));
  launch<dequantize_kernel>(cuda, "launching a dequantization", all.chunks_end, from, to, all);
}

void sum_quantized(const Cuda& cuda, const QuantizedSummands& from, const Numbers& into) {
  const Stretch all = whole_array(into.count, is_octet_aligned(into));
  launch<sum_quantized_kernel>(cuda, "launching a sum of quantized arrays", all.chunks_end, from, into, all);
}

}  // namespace ballast::kernels

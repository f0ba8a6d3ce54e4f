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
    if (threadIdx.x % threads_per_group == 0 && place.count > 0) {
      to.scales[place.first / group_size] = scale.scale;
    }
    const std::uint64_t index = rounding.first_index + place.first;
    store_codes(to.codes, to.bits, place, to_codes(floats, scale, to.bits, rounding, index));
  });
}

__global__ void __launch_bounds__(threads_per_chunk)
    dequantize_kernel(ConstQuantizedPiece from, Numbers to, Stretch all) {
  each_chunk(all.chunks_end, [&](std::size_t chunk) {
    const OctetPlace place = place_in(all, chunk, threadIdx.x);
    if (place.count > 0) {
      store_floats(to, place,
                   from_codes(load_codes(from.codes, from.bits, place), from.scales[place.first / group_size]));
    }
  });
}

template <class Byte>
bool aligned_codes(Byte* codes) {
  return is_octet_aligned(reinterpret_cast<const std::byte*>(codes), octet_size);
}

}  // namespace

void quantize(const Cuda& cuda, const ConstNumbers& from, const QuantizedPiece& to, const CodeRounding& rounding) {
  const Stretch all = whole_array(from.count, is_octet_aligned(from) && aligned_codes(to.codes));
  launch<quantize_kernel>(cuda, "launching a quantization", all.chunks_end, from, to, rounding, all);
}

void dequantize(const Cuda& cuda, const ConstQuantizedPiece& from, const Numbers& to) {
  const Stretch all = whole_array(to.count, is_octet_aligned(to) && aligned_codes(from.codes));
  launch<dequantize_kernel>(cuda, "launching a dequantization", all.chunks_end, from, to, all);
}

}  // namespace ballast::kernels

// The table of CPU walks: one for each instruction set, defined in walks_*.cpp. Only products of matrices use AVX512-BF16, in
// walks_avx512_bf16.cpp. A walk works on the calling thread, on one piece of memory.
#pragma once

#include <vector>

#include "kernels/multiply.h"
#include "kernels/numbers.h"
#include "kernels/quantize_math.h"
#include "kernels/simd/isa.h"
#include "kernels/update.h"

namespace ballast::kernels {

using MultiplyBlock = void (*)(const Product& product, const ProductBlock& block, BlockMemory& memory);

struct Walks {
  void (*update)(const TileMemory& tile, const GroupStep& step);
  void (*cast)(const ConstNumbers& from, const Numbers& to, Stores stores);
  void (*sum)(const Summands& from, const Numbers& into, Stores stores);
  void (*accumulate_stochastic)(const ConstNumbers& from, const Numbers& into, std::uint64_t stream,
                                std::uint64_t first_index);
  void (*sum_of_squares)(const ConstNumbers& values, double* sum_of_each_group);
  std::size_t (*first_non_finite)(const ConstNumbers& values);  // the count if there is none
  void (*quantize)(const ConstNumbers& from, const QuantizedPiece& to, const CodeRounding& rounding);
  void (*dequantize)(const ConstQuantizedPiece& from, const Numbers& to, Stores stores);
  void (*sum_quantized)(const QuantizedSummands& from, const Numbers& into);
  MultiplyBlock multiply_block;
  void (*divide)(const std::uint16_t* from, float divisor, std::uint16_t* to, std::size_t count);
};

const Walks& walks_for(simd::Isa isa);
std::vector<MultiplyBlock> multiply_blocks(
    simd::Isa isa);  // all that this machine can run, best first; walks_for() has the best

}  // namespace ballast::kernels

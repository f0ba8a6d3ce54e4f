#include "kernels/walks.h"

#include <array>

namespace ballast::kernels {

extern const Walks walks_scalar;
extern const Walks walks_avx2;
extern const Walks walks_avx512;
extern const MultiplyBlock multiply_block_avx512_bf16;

namespace simd {

std::span<const Isa> usable_isas() {
  static constexpr std::array all{Isa::avx512, Isa::avx2, Isa::scalar};
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return std::span(all).subspan(avx512 ? 0 : avx2 ? 1 : 2);
}

}  // namespace simd

const Walks& walks_for(simd::Isa isa) {
  switch (isa) {
    case simd::Isa::avx512: {
      static const Walks best = [] {
        Walks walks = walks_avx512;
        walks.multiply_block = multiply_blocks(simd::Isa::avx512).front();
        return walks;
      }();
      return best;
    }
    case simd::Isa::avx2: return walks_avx2;
    default: break;
  }
  return walks_scalar;
}

std::vector<MultiplyBlock> multiply_blocks(simd::Isa isa) {
  if (isa != simd::Isa::avx512) return {walks_for(isa).multiply_block};
  if (!__builtin_cpu_supports("avx512bf16")) return {walks_avx512.multiply_block};
  return {multiply_block_avx512_bf16, walks_avx512.multiply_block};
}

}  // namespace ballast::kernels

// Replaces isa_x86.cpp on aarch64, where every processor has NEON.
#include "kernels/walks.h"

namespace ballast::kernels {

extern const Walks walks_scalar;
extern const Walks walks_neon;

namespace simd {

std::span<const Isa> usable_isas() {
  static constexpr Isa all[] = {Isa::neon, Isa::scalar};
  return all;
}

}  // namespace simd

std::vector<MultiplyBlock> multiply_blocks(simd::Isa isa) { return {walks_for(isa).multiply_block}; }

const Walks& walks_for(simd::Isa isa) { return isa == simd::Isa::neon ? walks_neon : walks_scalar; }

}  // namespace ballast::kernels

// Replaces isa_x86.cpp on other processors: it has the scalar walks, which the compiler may vectorize.
#include "kernels/walks.h"

namespace ballast::kernels {

extern const Walks walks_scalar;

namespace simd {

std::span<const Isa> usable_isas() {
  static constexpr Isa only[] = {Isa::scalar};
  return only;
}

}  // namespace simd

std::vector<MultiplyBlock> multiply_blocks(simd::Isa) { return {walks_scalar.multiply_block}; }

const Walks& walks_for(simd::Isa) { return walks_scalar; }

}  // namespace ballast::kernels

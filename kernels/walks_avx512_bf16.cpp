#include "kernels/multiply_paired.h"
#include "kernels/multiply_walk.h"
#include "kernels/walks.h"

namespace ballast::kernels {
namespace {

struct Avx512Bf16 : simd::Avx512 {
};  // a name of its own, so that no processor without these instructions shares a function

}  // namespace

extern const MultiplyBlock multiply_block_avx512_bf16;
const MultiplyBlock multiply_block_avx512_bf16 = &multiply_block<Avx512Bf16, PairedFactors>;

}  // namespace ballast::kernels

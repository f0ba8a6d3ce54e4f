#include "kernels/simd/avx2.h"
#include "kernels/walks_table.h"

namespace ballast::kernels {

extern const Walks walks_avx2;
const Walks walks_avx2 = walks_of<simd::Avx2>();

}  // namespace ballast::kernels

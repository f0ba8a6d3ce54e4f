#include "kernels/simd/avx512.h"
#include "kernels/walks_table.h"

namespace ballast::kernels {

extern const Walks walks_avx512;
const Walks walks_avx512 = walks_of<simd::Avx512>();

}  // namespace ballast::kernels

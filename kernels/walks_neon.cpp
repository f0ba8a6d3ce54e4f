#include "kernels/simd/neon.h"
#include "kernels/walks_table.h"

namespace ballast::kernels {

extern const Walks walks_neon;
const Walks walks_neon = walks_of<simd::Neon>();

}  // namespace ballast::kernels

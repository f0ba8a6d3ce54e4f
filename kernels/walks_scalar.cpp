#include "kernels/simd/scalar.h"
#include "kernels/walks_table.h"

namespace ballast::kernels {

extern const Walks walks_scalar;
const Walks walks_scalar = walks_of<simd::Scalar>();

}  // namespace ballast::kernels

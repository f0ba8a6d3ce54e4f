// Prints the hardware that Ballast finds on this machine.
#include <fmt/format.h>

#include "kernels/runtime/machine.h"
#include "kernels/simd/isa.h"

int main() {
  fmt::print("{}", ballast::describe(ballast::detect_machine()));
  fmt::print("instruction set: {}\n", ballast::kernels::simd::name(ballast::kernels::simd::usable_isas().front()));
}

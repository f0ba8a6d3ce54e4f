#include "benchmarks/kernels/cases.h"

namespace ballast::benchmarks {

Suite kernels_suite() {
  return {.name = "kernels",
          .description = "Kernels on the CPU beside what the memory allows",
          .most_bytes_of_an_element = 32,
          .cases = {}};
}

}  // namespace ballast::benchmarks

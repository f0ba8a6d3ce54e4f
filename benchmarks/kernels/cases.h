#pragma once

#include "benchmarks/harness/suite.h"

namespace ballast::benchmarks {

// Returns the suite with every case, in the order of the table. To add a case, add a line in cases.cpp.
Suite kernels_suite();

}  // namespace ballast::benchmarks

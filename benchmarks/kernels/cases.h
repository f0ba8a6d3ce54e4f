#pragma once

#include "benchmarks/harness/suite.h"

namespace ballast::benchmarks {

// Every case of the suite, in the order of the table. A new one is a line in cases.cpp.
Suite kernels_suite();

}  // namespace ballast::benchmarks

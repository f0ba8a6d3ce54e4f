// The table that a person reads: one line a case, columns aligned, units written out.
#pragma once

#include <string>

#include "benchmarks/harness/record.h"

namespace ballast::benchmarks {

// Three digits that mean something: 0.123, 1.23, 12.3, 123.
std::string number(double value);

// "adamw split                 46.1 GB/s    copy              47.5 GB/s    0.97 ±0.01". Rows of one table align
// without knowing each other, so that each can be printed when it is measured; behind a long name the line is broken.
std::string row(const Measurement& measurement);

}  // namespace ballast::benchmarks

// The readable table: one line for each case, with aligned columns and written-out units.
#pragma once

#include <string>

#include "benchmarks/harness/record.h"

namespace ballast::benchmarks {

// Writes three significant digits: 0.123, 1.23, 12.3, 123.
std::string number(double value);

// Returns "adamw split                 46.1 GB/s    copy              47.5 GB/s    0.97 ±0.01". The columns are fixed,
// so that a row can be printed when it is measured. A long name has a line of its own.
std::string row(const Measurement& measurement);

}  // namespace ballast::benchmarks

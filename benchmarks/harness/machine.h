// The machine and the date of a record.
#pragma once

#include <string>

#include "kernels/runtime/machine.h"

namespace ballast::benchmarks {

std::string machine_name(const ThisMachine& machine);  // "AMD EPYC 9554, 2 cores"

std::string today();  // 2030-01-31, UTC

}  // namespace ballast::benchmarks

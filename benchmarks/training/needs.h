// The memory of this process that a run needs, and the work of its steps on drives.
#pragma once

#include "benchmarks/training/options.h"

namespace ballast::benchmarks {

// The work of one rank in a step that follows the program.
struct DriveWork {
  std::size_t read_bytes = 0;
  std::size_t written_bytes = 0;
  std::size_t record_bytes = 0;  // bytes of one read or write
  std::size_t records = 0;       // reads or writes in flight at once
};

DriveWork drive_work_of(const CompiledPlan& plan);

// Returns the resident memory of this process that is announced. Throws B2202 if a drive is too small.
std::size_t announced_memory(const RunOptions& options, const Plan& plan);

}  // namespace ballast::benchmarks

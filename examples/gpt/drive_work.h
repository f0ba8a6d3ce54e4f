// Computes the work of a step on the drives. Pure.
#pragma once

#include <ballast/plan.h>

#include <cstddef>

namespace ballast::gpt {

// The work of one rank in a step that follows the program.
struct DriveWork {
  std::size_t read_bytes = 0;
  std::size_t written_bytes = 0;
  std::size_t record_bytes = 0;  // read or written at a time
  std::size_t records = 0;       // in flight at once
};

DriveWork drive_work_of(const CompiledPlan& plan);

}  // namespace ballast::gpt

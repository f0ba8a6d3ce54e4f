// What a step asks of the drives. Pure.
#pragma once

#include "zero/plan/plan.h"

namespace ballast::gpt {

// Of one rank, in each step that keeps to the program.
struct DriveWork {
  std::size_t read_bytes = 0;
  std::size_t written_bytes = 0;
  std::size_t record_bytes = 0;  // read or written at a time
  std::size_t records = 0;       // in memory at once, on their way
};

DriveWork drive_work_of(const Plan& plan);

}  // namespace ballast::gpt

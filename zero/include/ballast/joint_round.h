// A round of the steps of several trainings, whose runs are resumed together: see joint_runs.h.
#pragma once

#include <cstdint>

namespace ballast {

// A round of steps, one of each training. None by default: the commit belongs to its run alone.
struct JointRound {
  std::uint64_t start = 0;    // a random number that all ranks draw together when the trainings start
  std::uint64_t number = 0;   // of the round since then
  std::uint64_t members = 0;  // how many trainings there are

  bool exists() const { return members > 0; }
  bool operator==(const JointRound&) const = default;
};

// What writes to the records of a run.
enum class RunWrite {
  step,
  change,  // of state, between steps
};

}  // namespace ballast

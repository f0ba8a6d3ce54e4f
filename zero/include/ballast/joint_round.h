// A round of the steps of several trainings, whose runs are resumed together: see joint_runs.h.
#pragma once

#include <compare>
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

// The name of a commit: each start of a run is an incarnation, and commits are counted.
struct RunPoint {
  std::uint64_t incarnation = 0;  // 0: before the first step of the run
  std::uint64_t number = 0;

  auto operator<=>(const RunPoint&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm
};

// Why records of a run are written.
enum class RunWrite {
  step,
  change,  // of state, between steps
};

}  // namespace ballast

// The records of a rank on its drives: where they are, the run that they belong to, its commits, and what becomes of it.
#pragma once

#include <ballast/log.h>

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace ballast {

// A round of steps, one of each of several trainings whose runs are resumed together: see joint_runs.h. None by default: the
// commit belongs to its run alone.
struct JointRound {
  std::uint64_t start = 0;    // a random number that all ranks draw together when the trainings start
  std::uint64_t number = 0;   // number of the round since then
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
  change,  // a change of state, between steps
};

// The notes of a run that another number of ranks continues, or another stage.
struct EarlierNotes {
  std::vector<std::vector<std::byte>> notes{};  // each earlier rank's note, in order
  // Each trained tensor of this training, in the order of units, has its place among those of the earlier one here.
  std::vector<std::size_t> places{};
};

// The steps that a run lost before it began again.
struct LostRun {
  std::string reason{};
  std::uint64_t step = 0;  // the newest one of which any rank had records
};

struct RecordOptions {
  std::vector<std::filesystem::path> directories{};  // existing ones, on one or several drives
  // The name of a run that is kept, which needs all state on drives (B1001). Without one, the files are temporary, and hold only
  // what is not in memory.
  std::string run{};
  // Each record of the run is written on a drive of a rank of another host too, at every step, so that the run survives the loss
  // of a host with its drives. Hosts mirror each other in pairs, and have as many ranks each. On one host, ranks mirror each
  // other, which survives the loss of a drive. Two ranks that mirror each other have directories of their own.
  bool mirror = false;
  std::string host{};  // this rank's host, which chooses where it is mirrored; empty: this machine's name
  // Where records of the run are missing or damaged, and no mirror has them: removes what is left and begins the run again; see
  // Training::lost(). Without it, that is an error, and nothing is changed.
  bool begins_again = false;
  // Returns the note with which a rank continues the run of other ranks: see Training::set_note(). It returns or throws the
  // same on all ranks. Without it, rank r gets the note of the earlier rank r, in turns.
  std::function<std::vector<std::byte>(const EarlierNotes& notes)> join_notes{};
  // The commit from which this one is resumed, together with other runs, which newest_joint_points() has chosen. Newer
  // ones do not count. Without it, a run that is resumed together with others is refused. {0, 0} begins any run again.
  std::optional<RunPoint> resume_at{};
  // Called by the trainer's thread before records are written, on all ranks. It may wait, or throw the same on all ranks.
  std::function<void(RunWrite)> before_write{};
  // Ranks that share a drive move records in rounds, and none waits longer for another one. 0: each moves them when it can.
  std::chrono::milliseconds turn_patience{2000};
  std::size_t depth = 16;  // requests at once, of each drive
  bool allow_network = false;
  Log* log = nullptr;  // outlives the records
};

}  // namespace ballast

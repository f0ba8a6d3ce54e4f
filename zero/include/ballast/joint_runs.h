// Several trainings whose runs are resumed together, such as those of the optimizers of one model.
//
// Each of them keeps a run of its own, and a crash may come between the commits of two. So each commit of a step names its round,
// in which every training commits once, and a start resumes the newest round that all of them have. A change between steps
// belongs to the round before it. None writes records of a round before the others have committed the last one.
//
//   std::vector<std::vector<RunCommit>> commits;
//   for (each training i) commits.push_back(commits_of_run(*world, options[i].drives));
//   const auto points = newest_joint_points(commits, names);
//   for (each training i) {
//     options[i].drives.resume_at = points ? (*points)[i] : RunPoint{};
//     options[i].drives.before_write = [&](RunWrite) { ... wait_for_commit() of the others ... };
//   }
//   ... construct and start all of them ...
//   JointRound round{.start = a random number, the same on all ranks, .number = 1, .members = how many trainings there are};
//   for (each step) {
//     for (each training) { training.set_round(round); training.step(); training.set_round({}); }
//     ++round.number;
//   }
#pragma once

#include <ballast/comm.h>
#include <ballast/records.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace ballast {

// A commit that the drives of all ranks hold as a whole.
struct RunCommit {
  RunPoint point{};
  std::uint64_t step = 0;
  JointRound round{};
};

// The commits from which the run could be resumed, the newest first. All ranks call it together, and get the same. Changes
// nothing. Throws B1009 or B3202 if the run has begun and could not be resumed.
std::vector<RunCommit> commits_of_run(Communicator& world, const RecordOptions& options);

// Where to resume each of the runs, so that all have made the same steps: the newest commits whose round every run has, or that
// belong to no round. None if no run has made a step. A pure function. `names` are those of the runs, for errors. Throws B1001 if
// another number of runs is resumed together, and B1009 if they have steps, but no round in common.
std::optional<std::vector<RunPoint>> newest_joint_points(std::span<const std::vector<RunCommit>> runs,
                                                         std::span<const std::string> names);

}  // namespace ballast

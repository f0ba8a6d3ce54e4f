#include <ballast/error.h>
#include <ballast/joint_runs.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "zero/comm/on_all_ranks.h"
#include "zero/engine/record_lane.h"
#include "zero/runs/records.h"
#include "zero/runs/search.h"

namespace ballast {
namespace {

using RunCommits = std::vector<RunCommit>;

std::string text_of(const std::string& name, const RunCommits& commits) {
  std::vector<std::string> texts;
  for (const auto& [point, step, round] : commits) {
    const std::string round_text = round.exists() ? fmt::format("of round {}", round.number) : "of no round";
    texts.push_back(fmt::format("step {} {}", step, round_text));
  }
  return fmt::format("run \"{}\" has {}", name,
                     texts.empty() ? "no step" : fmt::format("{}", fmt::join(texts, " and ")));
}

std::string texts_of(std::span<const RunCommits> runs, std::span<const std::string> names) {
  std::vector<std::string> texts;
  for (std::size_t run = 0; run < runs.size(); ++run)
    texts.push_back(text_of(names[run], runs[run]));
  return fmt::format("{}", fmt::join(texts, "; "));
}

void require_as_many(std::span<const RunCommits> runs, std::span<const std::string> names) {
  for (std::size_t run = 0; run < runs.size(); ++run) {
    for (const RunCommit& commit : runs[run]) {
      const JointRound& round = commit.round;
      require(!round.exists() || round.members == runs.size(), Code::bad_argument, [&] {
        return Problem{.what = fmt::format("cannot resume run \"{}\": it is resumed together with others", names[run]),
                       .needed = fmt::format("all {} runs that belong together", round.members),
                       .available = fmt::format("{} runs", runs.size()),
                       .remedy = "Resume all of them, or give the runs another name. Nothing was changed."};
      });
    }
  }
}

// The older commits of each run that may still be chosen, the newest first.
using Rest = std::vector<std::span<const RunCommit>>;

bool is_complete(const JointRound& round, const Rest& rest) {
  return !round.exists() || std::ranges::all_of(rest, [&](const auto& commits) {
    return std::ranges::find(commits, round, &RunCommit::round) != commits.end();
  });
}

}  // namespace

// A round that a run lacks is left out of the others too, which may make another one incomplete. No run begins a round before
// all have committed the last one, so what is left is one state.
std::optional<std::vector<RunPoint>> newest_joint_points(std::span<const RunCommits> runs,
                                                         std::span<const std::string> names) {
  require_as_many(runs, names);
  Rest rest(runs.begin(), runs.end());
  for (bool has_changed = true; has_changed;) {
    has_changed = false;
    for (auto& commits : rest) {
      if (commits.empty() || is_complete(commits.front().round, rest)) continue;
      commits = commits.subspan(1);
      has_changed = true;
    }
  }
  if (std::ranges::none_of(rest, [](const auto& commits) { return commits.empty(); })) {
    std::vector<RunPoint> points;
    for (const auto& commits : rest)
      points.push_back(commits.front().point);
    return points;
  }
  const auto has_begun = [](const RunCommit& commit) { return commit.step > 0; };
  const bool is_lost =
      std::ranges::any_of(runs, [&](const RunCommits& commits) { return std::ranges::any_of(commits, has_begun); });
  require(!is_lost, Code::run_mismatch, [&] {
    return Problem{
        .what = "cannot resume runs together: they have no round in common",
        .available = texts_of(runs, names),
        .remedy =
            "Give the runs their own directories of one moment, load a checkpoint in runs of another name, or "
            "begin such runs. Nothing was changed."};
  });
  return {};
}

// Looks before any of the run's records is opened.
std::vector<RunCommit> commits_of_run(Communicator& world, const RecordOptions& options) {
  require_run_name(options.run);
  std::vector<std::unique_ptr<offload::IoQueue>> owned;
  RunDrives drives{options};
  on_all_ranks(world, [&] {
    require_directories(options);
    for (std::size_t i = 0; i < options.directories.size(); ++i)
      drives.queues.push_back(
          owned.emplace_back(offload::open_queue({.depth = options.depth, .log = options.log})).get());
  });
  const RunSearch search(drives, world, Goal(options.run));
  const std::vector<RecordFiles> files = search.files();
  const std::vector<SeenRecords> seen = search.find_all(files);
  const KnownCheckpoint checkpoint = search.newest_checkpoint(files);
  std::vector<RunCommit> commits;
  offload::CommitPoint last = last_of_all;
  while (const auto run = find_whole_run(seen, last)) {
    const auto [incarnation, number] = run->point;
    commits.push_back({.point = {incarnation, number}, .step = run->step, .round = round_of(run->label)});
    last = {incarnation, number - 1};
  }
  if (commits.empty()) newest_whole_run(seen, Goal(options.run), checkpoint);  // throws if the run has begun
  return commits;
}

}  // namespace ballast

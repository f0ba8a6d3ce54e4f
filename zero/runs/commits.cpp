// The commits from which a run could be resumed, before any of its records is opened.
#include <ballast/error.h>
#include <ballast/joint_runs.h>

#include "zero/comm/on_all_ranks.h"
#include "zero/engine/joint_round.h"
#include "zero/runs/records.h"
#include "zero/runs/search.h"

namespace ballast {

std::vector<RunCommit> commits_of_run(Communicator& world, const RecordOptions& options) {
  require_run_name(options.run);
  require_directories(options);
  std::vector<std::unique_ptr<offload::IoQueue>> owned;
  std::vector<offload::IoQueue*> queues;
  std::vector<RecordFiles> files;
  on_all_ranks(world, [&] {
    for (std::size_t i = 0; i < options.directories.size(); ++i)
      queues.push_back(owned.emplace_back(offload::open_queue({.depth = options.depth, .log = options.log})).get());
    files = record_files_on(options.directories.front(), options.run);
  });
  const RunSearch search(options, queues, world);
  const std::vector<SeenRecords> seen = search.find_all(files);
  const KnownCheckpoint checkpoint = search.newest_checkpoint(files);
  std::vector<RunCommit> commits;
  offload::CommitPoint last = last_of_all;
  while (const auto run = find_whole_run(seen, last)) {
    const auto [incarnation, number] = run->point;
    commits.push_back({.point = {incarnation, number}, .step = run->step, .round = round_of(run->label)});
    last = {incarnation, number - 1};
  }
  if (commits.empty()) newest_whole_run(seen, options.run, checkpoint);  // throws if the run has begun
  return commits;
}

}  // namespace ballast

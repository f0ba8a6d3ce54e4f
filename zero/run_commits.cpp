// The commits from which a run could be resumed, before any of its records is opened.
#include <ballast/error.h>
#include <ballast/joint_runs.h>

#include <map>

#include "zero/comm/on_all_ranks.h"
#include "zero/engine/joint_round.h"
#include "zero/own_run.h"
#include "zero/plan/description.h"
#include "zero/records.h"
#include "zero/run_search.h"

namespace ballast {
namespace {

class CommitSearch {
 public:
  CommitSearch(Communicator& world, const RecordOptions& options) : world_(world), options_(options) {
    for (std::size_t i = 0; i < options.directories.size(); ++i) {
      owned_.push_back(offload::open_queue({.depth = options.depth, .log = options.log}));
      queues_.push_back(owned_.back().get());
    }
  }

  std::vector<RunCommit> find() {
    on_all_ranks(world_, [&] {
      for (const RecordFiles& files : record_files_on(options_.directories.front(), options_.run))
        look(files);
    });
    seen_ = seen_by_all(world_, mine_);
    require_one_run(seen_, options_.run);
    std::vector<RunCommit> commits;
    offload::CommitPoint last = last_of_all;
    while (const auto run = find_whole_run(seen_, last)) {
      if (drop_damaged(*run)) continue;
      const auto [incarnation, number] = run->point;
      commits.push_back({.point = {incarnation, number}, .step = run->step, .round = round_of(run->label)});
      last = {incarnation, number - 1};
    }
    if (commits.empty()) newest_whole_run(seen_, options_.run);  // throws if the run has begun
    return commits;
  }

 private:
  offload::StoreOptions options_of(const RecordFiles& files) const {
    return {.name = files.name(),
            .file = {.allow_network = options_.allow_network, .writable = false},
            .log = options_.log};
  }

  // Nothing if it is a mirror that cannot be read, as if it were missing.
  std::optional<offload::FoundRecords> found_in(const RecordFiles& files) const {
    try {
      return offload::RecordStore::look(drives_of(files, options_, queues_), options_of(files));
    } catch (const Error& error) {
      if (!files.is_mirror || (error.code() != Code::bad_record && error.code() != Code::run_mismatch)) throw;
      return {};
    }
  }

  void look(const RecordFiles& files) {
    const auto found = found_in(files);
    if (!found) return;
    SeenRecords seen = seen_records(files, world_.rank(), *found);
    const auto folder = files.directory(options_.directories.front(), options_.run);
    const auto lines = read_run_description(folder / files.description_name());
    const auto described = digest_of(lines) == seen.digest ? read_description(lines) : std::nullopt;
    seen.is_described = described.has_value();
    if (described) seen.placement = described->placement;
    mine_.push_back(std::move(seen));
    shapes_.emplace(files, found->shape);
  }

  // A commit can exist without all of its records. Returns whether that is so on any rank, and forgets such commits.
  bool drop_damaged(const WholeRun& run) {
    std::int64_t damaged = 0;
    on_all_ranks(world_, [&] {
      for (const auto& copies : run.copies) {
        for (const WholeRun::Copy& copy : copies) {
          if (copy.seen_by != world_.rank() || is_there(run.files_of(copy), run.point)) continue;
          drop(mine_, run.files_of(copy), copy.seen_by, run.point);
          ++damaged;
        }
      }
    });
    world_.all_reduce({&damaged, 1});
    if (damaged > 0) seen_ = seen_by_all(world_, mine_);
    return damaged > 0;
  }

  bool is_there(const RecordFiles& files, offload::CommitPoint point) const {
    try {
      const auto drives = drives_of(files, options_, queues_);
      return offload::RecordStore::open(shapes_.at(files), drives, options_of(files)).go_to(point);
    } catch (const Error& error) {
      if (error.code() != Code::bad_record) throw;
      if (options_.log != nullptr) options_.log->warning(error.what());
      return false;
    }
  }

  Communicator& world_;
  const RecordOptions& options_;
  std::vector<std::unique_ptr<offload::IoQueue>> owned_{};
  std::vector<offload::IoQueue*> queues_{};
  std::vector<SeenRecords> mine_{};  // seen by this rank
  std::vector<SeenRecords> seen_{};  // by all ranks
  std::map<RecordFiles, offload::RecordShape> shapes_{};
};

}  // namespace

std::vector<RunCommit> commits_of_run(Communicator& world, const RecordOptions& options) {
  require_run_name(options.run);
  return CommitSearch(world, options).find();
}

}  // namespace ballast

// What a rank sees of a run on its drives, what all ranks see together, and whether it is intact.
#pragma once

#include <ballast/comm.h>
#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "offload/chunk_file.h"
#include "zero/checkpoint/files.h"
#include "zero/comm/on_all_ranks.h"
#include "zero/engine/record_lane.h"
#include "zero/runs/inventory.h"

namespace ballast {

// Ranks of this job that see the same files: those of a machine whose directories are the same. One of them looks at a file, and
// tells the others, because a drive does not carry N^2 opens for N ranks. A site has the number of its lowest rank.
class Sites {
 public:
  Sites(Communicator& world, const RecordOptions& options);  // all ranks call it together

  std::size_t of(std::size_t rank) const { return site_of_.at(rank); }
  std::size_t own() const { return of(rank_); }
  bool has(std::size_t rank) const { return rank < site_of_.size() && of(rank) == own(); }  // any rank of the run
  // Whether this rank looks at the files of that rank of the run: each rank does at its own, and at those of others in turns.
  bool looks_at(std::size_t rank) const { return (has(rank) ? rank : ranks_[rank % ranks_.size()]) == rank_; }
  std::span<const std::size_t> ranks() const { return ranks_; }  // of the own site

 private:
  std::size_t rank_;
  std::vector<std::size_t> site_of_{};
  std::vector<std::size_t> ranks_{};
};

class RunSearch {
 public:
  // All of it outlives this. `own`: the training that is going to resume the run; null: none yet. All ranks call it together.
  RunSearch(const RunDrives& drives, Communicator& world, const Goal& goal, const OwnRun* own = nullptr)
      : drives_(drives), world_(world), own_(own), goal_(goal), sites_(world, drives.options) {}

  const Sites& sites() const { return sites_; }
  Communicator& world() const { return world_; }

  // The files that this rank sees, in order. All ranks call it together.
  std::vector<RecordFiles> files() const;

  // What one of this rank's files holds; nothing if it cannot be read, or is a mirror of another run. Throws B1009 if they are of a
  // run that is resumed together with others, and the training resumes it alone.
  std::optional<offload::FoundRecords> found_in(const RecordFiles& files) const {
    return drives_.unless_damaged([&] { return read_head(files); }, files.is_mirror);
  }

  // The same, but throws B3202 if it cannot be read.
  std::optional<offload::FoundRecords> read_head(const RecordFiles& files) const {
    auto found = offload::RecordStore::look(drives_.drives(files), drives_.files_of(files));
    require(!found || found->shape.rank == files.rank, Code::run_mismatch, [&] {
      return Problem{.what = fmt::format("cannot {}: this is the directory of rank {}", goal_.what, found->shape.rank),
                     .where = drives_.first_directory(files).string(),
                     .needed = fmt::format("that of rank {}", files.rank),
                     .remedy = "Give every rank its own directories. Nothing was changed."};
    });
    if (found) require_joint(*found);
    return found;
  }

  // Whether this rank's files have a commit, which was found there, with the heads of all its records.
  bool has_commit(const RecordFiles& files, const offload::FoundRecords& found, offload::CommitPoint point) const {
    return drives_.unless_damaged([&] { return holds(files, found, point); });
  }

  // Throws B3201 if a drive of this rank's files cannot read them. That may pass, so they are not lost.
  void require_readable_drives(std::span<const RecordFiles> files) const {
    for (const RecordFiles& each : files) {
      if (!sites_.looks_at(each.rank)) continue;
      try {
        const auto found = read_head(each);
        if (!found) continue;
        for (const auto& commit : found->commits)
          holds(each, *found, commit.point);
      } catch (const Error& error) {
        if (error.code() == Code::file_call) throw;
      }
    }
  }

  // Empty if it is missing, damaged or of other records.
  std::string description_of(const RecordFiles& files, std::uint64_t digest) const {
    std::string manifest = read_run_manifest(drives_.description_file(files));
    return digest_of(manifest) == digest ? std::move(manifest) : std::string();
  }

  // What the description of a run says of its records. All ranks call it together. Throws B1009 if they are not those of this
  // model and rule.
  RecordedState state_of(const WholeRun& run) const;

  // All ranks call these together, each with the files that it sees. The first one throws B1009 if they belong to several runs, and
  // leaves out commits that lack records.
  std::vector<SeenRecords> find_all(std::span<const RecordFiles> files) const {
    std::vector<SeenRecords> mine;
    on_all_ranks(world_, [&] {
      for (const RecordFiles& each : files) {
        if (!sites_.looks_at(each.rank)) continue;
        const SeenRecords seen = seen_in(each);
        if (!each.is_mirror || seen.run_id != 0) mine.push_back(seen);
      }
    });
    std::vector<SeenRecords> all = seen_by_all(world_, mine);
    require_one_run(all, goal_);
    return all;
  }

  // Every rank that has saved one knows it, and some of them may be lost.
  KnownCheckpoint newest_checkpoint(std::span<const RecordFiles> files) const {
    std::string mine;
    on_all_ranks(world_, [&] {
      for (const RecordFiles& each : files) {
        if (!sites_.looks_at(each.rank)) continue;
        const KnownCheckpoint found = newest_checkpoint_of(drives_.first_directory(each));
        if (!found.path.empty()) mine += fmt::format("{} {}\n", found.step, found.path);
      }
    });
    KnownCheckpoint newest;
    for (const std::string& text : texts_of_all(world_, mine)) {
      for (const std::string& line : lines_of(text)) {
        const std::size_t space = line.find(' ');
        const std::uint64_t step = std::stoull(line);
        if (newest.path.empty() || step > newest.step) newest = {step, line.substr(space + 1)};
      }
    }
    return newest;
  }

  // Drops the commit from `seen` for the files in `damaged`, which each rank passes for its own drives. Returns whether any rank
  // passed one.
  bool forget(std::vector<SeenRecords>& seen, offload::CommitPoint point, std::span<const RecordFiles> damaged) const {
    bool is_any = false;
    const auto by_rank = files_of_all(damaged);
    for (std::size_t seer = 0; seer < by_rank.size(); ++seer) {
      for (const RecordFiles& files : by_rank[seer]) {
        is_any = true;
        drop(seen, files, seer, point);
      }
    }
    return is_any;
  }

 private:
  // What each rank passes. All ranks call it together.
  std::vector<std::vector<RecordFiles>> files_of_all(std::span<const RecordFiles> mine) const;

  // Alone it would be resumed from steps that the others may not have.
  void require_joint(const offload::FoundRecords& found) const {
    const auto joint =
        std::ranges::find_if(found.commits, [](const auto& each) { return round_of(each.label).exists(); });
    require(own_ == nullptr || own_->options.resume_at || joint == found.commits.end(), Code::run_mismatch, [&] {
      return Problem{
          .what = fmt::format("cannot {} alone: it is one of {} that are resumed together", goal_.what,
                              round_of(joint->label).members),
          .remedy = goal_.remedy("Resume all of them together; or give the run another name. Nothing was changed.")};
    });
  }

  bool holds(const RecordFiles& files, const offload::FoundRecords& found, offload::CommitPoint point) const {
    if (const auto missing = drives_.missing_file(files)) {
      drives_.warn(fmt::format("the records of rank {} do not count: {} is missing", files.rank, missing->string()));
      return false;
    }
    return offload::RecordStore::open(found.shape, drives_.drives(files), drives_.files_of(files, false)).go_to(point);
  }

  SeenRecords seen_in(const RecordFiles& files) const {
    const auto found = found_in(files);
    if (!found) return {.seen_by = world_.rank(), .site = sites_.own(), .files = files, .lacks_records = true};
    SeenRecords seen = seen_records(files, world_.rank(), *found);
    seen.site = sites_.own();
    const auto last = own_ == nullptr ? last_of_all : own_->last();
    const auto newest = std::ranges::find_if(found->commits, [&](const auto& each) { return each.point <= last; });
    bool lacks_step = false;  // nothing is lost before the first one
    std::erase_if(seen.commits, [&](const auto& each) {
      const bool is_lacking = !has_commit(files, *found, each.point);
      lacks_step = lacks_step || (is_lacking && each.step > 0);
      return is_lacking;
    });
    const bool is_marked = drives_.are_marked_damaged(files);
    if (lacks_step || is_marked) seen.lacks_records = true;
    seen.has_newest =
        !is_marked && newest != found->commits.end() && (newest->point.incarnation == 0 || seen.has(newest->point));
    if (own_ != nullptr && seen.digest == own_->shape.content_digest) {
      seen.is_described = seen.is_of_model = true;
      seen.placement = own_->plan.placement();
    } else if (const auto state = RecordedState::of(description_of(files, seen.digest))) {
      seen.is_described = true;
      seen.placement = state->placement();
      seen.is_of_model = own_ != nullptr && !first_obstacle(state->saved(), own_->plan);
    }
    return seen;
  }

  const RunDrives& drives_;
  Communicator& world_;
  const OwnRun* own_;
  Goal goal_;
  Sites sites_;
};

// The records of a whole run at its commit, as this rank sees them. They are read, and never changed.
class EarlierRecords {
 public:
  // `shape`: with the id of the run. All of it outlives this.
  EarlierRecords(const RunDrives& drives, const WholeRun& run, const offload::RecordShape& shape)
      : drives_(drives), run_(run), shape_(shape) {}

  // Whether a copy, which this rank sees, has the heads of all records; are_intact() reads all of their bytes, too.
  bool are_there(const WholeRun::Copy& copy) { return opened(copy).store.has_value(); }

  bool are_intact(const WholeRun::Copy& copy) {
    return drives_.unless_damaged([&] {
      std::vector<offload::ChunkPlace> places;
      for (std::size_t record = 0; record < shape_.tiles; ++record)
        places.push_back(place_of(copy, record));
      offload::ChunkReader reader(files_, places, *drives_.queues.front());
      for (std::size_t record = 0; record < shape_.tiles; ++record)
        reader.next();
      return true;
    });
  }

  std::span<const std::byte> note_of(const WholeRun::Copy& copy) { return whole(copy).store->note(); }

  // The trained tensors of the run. Ranges of them have pieces in files(), in the copy that `choose` returns; null: they have none.
  using Choose = std::function<const WholeRun::Copy*(std::size_t shard, const std::string& tensor, const Range& range)>;
  SavedTensors tensors(const RecordedState& state, const Choose& choose);
  const std::vector<std::filesystem::path>& files() const { return files_; }

 private:
  struct Opened {
    std::optional<offload::RecordStore> store{};  // none: records are damaged
    std::size_t first_file = 0;
  };

  Opened& opened(const WholeRun::Copy& copy) {
    const auto [found, is_new] = stores_.try_emplace(std::pair(copy.rank, copy.is_mirror));
    if (is_new) {
      const RecordFiles files = run_.files_of(copy);
      const std::vector<offload::Drive> drives = drives_.drives(files);
      offload::RecordShape shape = shape_;
      shape.rank = static_cast<std::uint32_t>(copy.rank);
      offload::RecordStore store = offload::RecordStore::open(shape, drives, drives_.files_of(files, false));
      found->second.first_file = files_.size();
      for (const offload::Drive& drive : drives)
        files_.push_back(drives_.files_of(files).path_in(drive.directory));
      if (store.go_to(run_.point)) found->second.store.emplace(std::move(store));
    }
    return found->second;
  }

  Opened& whole(const WholeRun::Copy& copy) {
    Opened& found = opened(copy);
    require(found.store.has_value(), Code::bad_record, [&] {
      return Problem{.what = "cannot take over records: some of them are missing or damaged",
                     .where = drives_.first_directory(run_.files_of(copy))};
    });
    return found;
  }

  offload::ChunkPlace place_of(const WholeRun::Copy& copy, std::size_t record) {
    const Opened& found = whole(copy);
    offload::ChunkPlace place = found.store->place_of(record);
    place.file += found.first_file;
    return place;
  }

  const RunDrives& drives_;
  const WholeRun& run_;
  offload::RecordShape shape_;
  std::map<std::pair<std::size_t, bool>, Opened> stores_{};  // by rank, and whether it is its mirror
  std::vector<std::filesystem::path> files_{};
};

// Whether each rank sees its own records of the run at its commit. Records that are known to be damaged count only where
// there is no other copy.
bool is_in_place(const WholeRun& run, std::span<const SeenRecords> seen, const OwnRun& own, std::size_t ranks);

// Returns a run that is in place at an earlier commit, if an earlier read of records at its own commit has failed and fails
// again. None if nothing is damaged, or if not all ranks have an earlier commit that is intact. The log says which. All ranks
// call it together.
std::optional<WholeRun> run_before_damage(const WholeRun& run, std::span<const SeenRecords> seen, const OwnRun& own,
                                          Communicator& world);

}  // namespace ballast

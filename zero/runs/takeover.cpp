#include "zero/runs/takeover.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>

#include "offload/directory_lock.h"
#include "zero/comm/on_all_ranks.h"
#include "zero/runs/in_place.h"
#include "zero/runs/inventory.h"
#include "zero/runs/joint_space.h"
#include "zero/runs/reshard.h"
#include "zero/runs/search.h"

namespace ballast {
namespace {

class Takeover {
 public:
  Takeover(const OwnRun& own, Communicator& world)
      : own_(own),
        world_(world),
        first_drive_(own.options.directories.front()),
        search_(own.options, own.queues, world, &own) {}

  RecordFiles settle() {
    on_all_ranks(world_, [&] { files_ = record_files_on(first_drive_, own_.name()); });
    RecordFiles opened{.rank = own_.rank()};
    if (all_in_place(opened)) {
      kept_ = opened.made_in;
      return opened;
    }
    lock_others();
    find_all();
    std::optional<WholeRun> run = newest_run();
    if (run && is_in_place(*run)) go_before_damage(*run);
    if (run && !is_in_place(*run)) run = take_over(*run);
    if (!run) {
      remove_all_but(std::nullopt, {});
      files_.clear();
      return opened;
    }
    kept_ = run->made_in;
    return {own_.rank(), run->made_in};
  }

  const std::optional<LostRun>& lost() const { return lost_; }
  offload::CommitPoint last() const { return last_; }

  void remove_others(std::span<const std::size_t> mirrored) {
    remove_all_but(kept_, mirrored);
    remove_leftovers();
  }

 private:
  // --- The usual case: each rank finds its own records, or no rank finds any.

  bool all_in_place(RecordFiles& opened) {
    std::vector<std::int64_t> made_in(world_.size());  // plus 2; 0: nothing; 1: elsewhere
    RankHistory history;
    on_all_ranks(world_, [&] {
      std::vector<RecordFiles> here;  // its own, and those of ranks that this job does not have
      std::ranges::copy_if(files_, std::back_inserter(here), [&](const RecordFiles& files) {
        return !files.is_mirror && (files.rank == own_.rank() || files.rank >= world_.size());
      });
      const auto own = here.size() == 1 && here[0].rank == own_.rank() ? openable(here[0]) : std::nullopt;
      const bool is_own = own.has_value();
      if (own) history = history_of(own);
      // Mirrors of ranks whose records are in place do not count; but a rank of which there is nothing else has lost its own.
      made_in[own_.rank()] = files_.empty() ? 0 : is_own ? static_cast<std::int64_t>(here[0].made_in) + 2 : 1;
      opened.made_in = is_own ? here[0].made_in : 0;
    });
    world_.all_reduce(made_in);
    const bool begins_again = last_ == offload::CommitPoint{} && std::ranges::any_of(made_in, std::identity{});
    if (begins_again) return false;
    const auto is_in_place = [&](std::int64_t each) { return each != 1 && each == made_in[0]; };
    if (!std::ranges::all_of(made_in, is_in_place)) return false;
    // A rank's own records may be too old, where their mirror is not.
    return !are_apart(histories_of_all(world_, history), last_);
  }

  // Nothing where another copy may be whole, such as a mirror, or the records are those of another stage, format or tiles.
  std::optional<offload::FoundRecords> openable(const RecordFiles& files) const {
    auto found = search_.found_in(files);
    if (!found || found->shape.content_digest != own_.shape.content_digest) return {};
    if (last_ == offload::CommitPoint{}) return found;  // no commit counts
    const auto newest = std::ranges::find_if(found->commits, [&](const auto& each) { return each.point <= last_; });
    if (newest == found->commits.end() || (resumes_chosen() && newest->point != last_)) return {};
    const bool is_whole = !search_.is_marked_damaged(files) && search_.has_commit(files, newest->point);
    return is_whole ? found : std::nullopt;
  }

  bool resumes_chosen() const { return own_.options.resume_at && last_ != offload::CommitPoint{}; }

  // --- Which records there are.

  // The lock of rank 0 alone keeps other jobs on these drives out; this keeps out those that still end.
  void lock_others() {
    on_all_ranks(world_, [&] {
      for (const RecordFiles& files : files_) {
        const bool is_mine_to_lock =
            !files.is_mirror && files.rank >= world_.size() && files.rank % world_.size() == own_.rank();
        if (is_mine_to_lock) locks_.try_emplace(files.rank, files.directory(first_drive_, own_.name()));
      }
    });
  }

  void find_all() {
    seen_ = search_.find_all(files_);
    checkpoint_ = search_.newest_checkpoint(files_);
  }

  // None if the run begins, or begins again: never in place of records that may be those of another training.
  std::optional<WholeRun> newest_run() {
    try {
      auto run = newest_whole_run(seen_, own_.name(), checkpoint_, last_);
      if (!run) require_own_model();
      require_chosen(own_, run ? std::optional(run->point) : std::nullopt);
      return run;
    } catch (const Error& error) {
      const bool may_begin_again = own_.options.begins_again && !resumes_chosen();  // else without the other runs
      if (!may_begin_again || !std::ranges::all_of(seen_, &SeenRecords::is_of_model)) {
        require_readable();
        throw;
      }
      on_all_ranks(world_, [&] { search_.require_readable_drives(files_); });
      const auto& [what, where, needed, available, remedy] = error.problem();
      lost_.emplace(LostRun{.reason = where.empty() ? what : fmt::format("{} ({})", what, where)});
    }
    for (const SeenRecords& seen : seen_) {
      for (const auto& commit : seen.commits)
        lost_->step = std::max(lost_->step, commit.step);
    }
    return {};
  }

  // A file that cannot be read says more than that the rank's records are missing.
  void require_readable() const {
    for (const RecordFiles& files : files_) {
      if (!files.is_mirror) search_.read_head(files);
    }
  }

  // Where a run begins, steps that it has by now are removed, with those that come after resume_at.
  void require_own_model() const {
    const auto other = std::ranges::find_if(seen_, [](const SeenRecords& seen) {
      return !seen.is_of_model && std::ranges::any_of(seen.commits, [](const auto& commit) { return commit.step > 0; });
    });
    require(other == seen_.end(), Code::run_mismatch, [&] {
      return Problem{.what = fmt::format("cannot begin run \"{}\" again: another training began it", own_.name()),
                     .where = fmt::format("the records of rank {}", other->files.rank),
                     .remedy = "Give the run another name. Nothing was changed."};
    });
  }

  bool is_in_place(const WholeRun& run) const { return ballast::is_in_place(run, seen_, own_, world_.size()); }

  void go_before_damage(WholeRun& run) {
    if (resumes_chosen()) return;
    auto earlier = run_before_damage(run, seen_, own_, search_, world_);
    if (!earlier) return;
    run = std::move(*earlier);
    last_ = run.point;
  }

  // --- From the records of others to this training's own.

  // Returns the run as this training keeps it; none if too many of its records are damaged, and it begins again.
  std::optional<WholeRun> take_over(WholeRun run) {
    while (true) {
      const RecordedState state = state_of(run);
      const offload::RecordShape shape = shape_of(run, state);
      EarlierRecords records(own_, run, shape);
      if (!drop_damaged(run, records)) {
        rewrite(run, state, records);
        return run;
      }
      auto next = newest_run();
      require(next || lost_, Code::internal, [] { return Problem{.what = "a run lost all of its commits"}; });
      if (!next) return {};
      run = std::move(*next);
    }
  }

  // What the description of the run says of its records. Throws B1009 if they are not those of this model and rule.
  RecordedState state_of(const WholeRun& run) const {
    const WholeRun::Copy& copy = run.copies.front().front();
    std::string text;
    on_all_ranks(world_, [&] {
      if (copy.seen_by != own_.rank()) return;
      const auto lines = run.digest == own_.shape.content_digest
                             ? own_.description
                             : search_.description_of(run.files_of(copy), run.digest);
      text = fmt::format("{}", fmt::join(lines, "\n"));
    });
    const std::vector<std::string> lines = lines_of(broadcast_text(world_, text, copy.seen_by));
    const auto described = read_description(lines);
    require(described.has_value(), Code::run_mismatch, [&] { return unreadable(); });
    const auto difference = first_obstacle(*described, own_.plan.model(), own_.plan.rule());
    require(!difference, Code::run_mismatch, [&] {
      return Problem{.what = fmt::format("cannot resume run \"{}\": it has {}, but this training has {}", own_.name(),
                                         difference->one, difference->other),
                     .remedy =
                         "Resume with the model and the optimizer that began the run; or give the run another "
                         "name. Nothing was changed."};
    });
    auto state = RecordedState::of(lines, own_.plan.names());
    require(state.has_value(), Code::run_mismatch, [&] { return unreadable(); });
    return std::move(*state);
  }

  Problem unreadable() const {
    return {
        .what = fmt::format("cannot resume run \"{}\" on other ranks: its description is not as this version of "
                            "Ballast writes it",
                            own_.name()),
        .remedy = "Resume with the training that began the run; or give the run another name. Nothing was changed."};
  }

  offload::RecordShape shape_of(const WholeRun& run, const RecordedState& state) const {
    offload::RecordShape shape = state.shape();
    shape.run_id = known_run_id(seen_);
    shape.content_digest = run.digest;
    return shape;
  }

  // A commit can exist without all of its records. Returns whether that is so, and forgets such commits. Where there is another
  // copy to read, all bytes are checked, since later an error would end the takeover.
  bool drop_damaged(const WholeRun& run, EarlierRecords& records) {
    std::vector<RecordFiles> damaged;
    on_all_ranks(world_, [&] {
      for (std::size_t shard = 0; shard < run.copies.size(); ++shard) {
        const WholeRun::Copy& copy = run.nearest(shard, own_.rank());
        if (copy.seen_by != own_.rank()) continue;
        const bool has_others = run.copies[shard].size() > 1;
        if (!(has_others ? records.are_intact(copy) : records.are_there(copy))) damaged.push_back(run.files_of(copy));
      }
    });
    return search_.forget(seen_, run.point, damaged);
  }

  // The new records get a commit that is newer than all others, so that the next start finds them even if it finds the old
  // ones too.
  void rewrite(WholeRun& run, const RecordedState& state, EarlierRecords& records) {
    const RecordFiles files{own_.rank(), next_incarnation(seen_)};
    offload::RecordShape shape = own_.shape;
    shape.run_id = known_run_id(seen_);
    Resharding resharding(own_, run, state, records, world_);
    const std::vector<std::byte> note = resharding.note();
    log_takeover(run, state.described());
    require_joint_space(world_, shape, own_.options.directories, 1);
    std::optional<offload::RecordStore> store;
    bool is_committed = false;  // then another rank may have removed the old records already
    try {
      on_all_ranks(world_, [&] {
        write_run_description(own_.description_file(files), own_.description);
        store.emplace(offload::RecordStore::create(shape, own_.drives(files), own_.files_of(files)));
        store->count_from({files.made_in, run.point.number});
      });
      resharding.write(*store);
      on_all_ranks(world_, [&] {
        store->commit(run.step, note, run.label);
        is_committed = true;
      });
    } catch (...) {
      store.reset();
      if (!is_committed) remove_made(files);
      throw;
    }
    run.made_in = files.made_in;
    last_ = store->point();
  }

  // After a failure, which is the error that counts.
  void remove_made(const RecordFiles& files) const {
    const auto& drives = own_.options.directories;
    for (auto drive = drives.rbegin(); drive != drives.rend(); ++drive) {
      try {
        remove_records(*drive, own_.name(), files);
      } catch (const Error&) {  // the next start removes them
      }
    }
  }

  void log_takeover(const WholeRun& run, const Described& described) const {
    if (own_.options.log == nullptr || own_.rank() > 0) return;
    own_.options.log->info(
        fmt::format("takes over run \"{}\" ({:#x}) after step {} from {} rank{}, with state format {}", own_.name(),
                    known_run_id(seen_), run.step, run.placement.ranks(), run.placement.ranks() == 1 ? "" : "s",
                    name(described.format)));
  }

  // --- The end.

  // Whether a rank of this job has locked the directory: its own.
  bool is_in_use(const RecordFiles& files, const std::filesystem::path& drive) const {
    try {
      const offload::DirectoryLock lock(files.directory(drive, own_.name()));
      return false;
    } catch (const Error&) {
      return true;
    }
  }

  void remove_all_but(std::optional<std::uint64_t> made_in, std::span<const std::size_t> mirrored) {
    const auto is_unused = [&](const RecordFiles& files) {
      return files.is_mirror && std::ranges::find(mirrored, files.rank) == mirrored.end();
    };
    const auto each_other = [&](auto remove) {
      on_all_ranks(world_, [&] {
        for (const RecordFiles& files : files_) {
          if (files.made_in == made_in && !is_unused(files)) continue;
          const auto& drives = own_.options.directories;
          std::for_each(drives.rbegin(), drives.rend(), [&](const auto& drive) {
            remove(drive, files);  // from the first drive last: files are looked for there
          });
        }
      });
    };
    each_other([&](const auto& drive, const RecordFiles& files) { remove_records(drive, own_.name(), files); });
    locks_.clear();
    each_other([&](const auto& drive, const RecordFiles& files) {
      const bool is_left = files.rank >= world_.size() || (is_unused(files) && !is_in_use(files, drive));
      if (is_left) remove_empty_directory(drive, own_.name(), files);
    });
    files_.clear();
  }

  // No rank makes files of the run any more. Another rank that keeps the directory removes its own leftovers.
  void remove_leftovers() {
    on_all_ranks(world_, [&] {
      for (const auto& drive : own_.options.directories) {
        for (const auto& [files, path] : leftovers_on(drive, own_.name())) {
          if (!files.is_mirror && files.rank != own_.rank() && is_in_use(files, drive)) continue;
          std::error_code gone;
          std::filesystem::remove(path, gone);
          if (files.rank >= world_.size()) remove_empty_directory(drive, own_.name(), files);
        }
      }
    });
  }

  const OwnRun& own_;
  Communicator& world_;
  const std::filesystem::path& first_drive_;
  RunSearch search_;
  std::vector<RecordFiles> files_{};  // that this rank sees
  std::vector<SeenRecords> seen_{};   // by all ranks
  KnownCheckpoint checkpoint_{};
  offload::CommitPoint last_ = own_.last();
  std::optional<LostRun> lost_{};
  std::optional<std::uint64_t> kept_{};                    // made_in of the records that this training has
  std::map<std::size_t, offload::DirectoryLock> locks_{};  // by rank of the run
};

}  // namespace

void require_chosen(const OwnRun& own, const std::optional<offload::CommitPoint>& point) {
  const bool begins = own.last() == offload::CommitPoint{};
  const bool is_chosen = !own.options.resume_at || (begins ? !point : point == own.last());
  require(is_chosen, Code::bad_record, [&] {
    return Problem{
        .what = fmt::format("cannot resume run \"{}\" at the commit that others resume with it: records of this commit "
                            "are missing or damaged",
                            own.name()),
        .needed = fmt::format("commit {} of incarnation {}", own.last().number, own.last().incarnation),
        .remedy = "Start again, which chooses another commit if there is one. Nothing was changed."};
  });
}

SettledRun settle_run(const OwnRun& own, Communicator& world) {
  const auto takeover = std::make_shared<Takeover>(own, world);
  const RecordFiles files = takeover->settle();
  return {files, takeover->last(), takeover->lost(),
          [takeover](std::span<const std::size_t> mirrored) { takeover->remove_others(mirrored); }};
}

}  // namespace ballast

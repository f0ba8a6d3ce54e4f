#include "zero/runs/adopt_run.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "kernels/state_access.h"
#include "offload/run_directory.h"
#include "zero/comm/on_all_ranks.h"
#include "zero/plan/names_in_files.h"
#include "zero/runs/joint_space.h"
#include "zero/runs/search.h"

namespace ballast {
namespace {

constexpr std::size_t records_under_way = 2;  // one is filled while the other is written

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// Rewrites the records of a run for a training with other ranks, another stage, format or tiles, one record at a time.
class RunRewrite {
 public:
  // All of it outlives this.
  RunRewrite(const OwnRun& own, const WholeRun& run, const RecordedState& state, EarlierRecords& records,
             const RunSearch& search)
      : own_(own),
        run_(run),
        state_(state),
        records_(records),
        world_(search.world()),
        sites_(search.sites()),
        names_(names_in_runs(own.plan.model())) {
    for (std::size_t rank = 0; rank < world_.size(); ++rank) {
      for (std::size_t shard = 0; shard < run.copies.size(); ++shard) {
        if (reader_of(shard, rank) != rank) receivers_.insert(rank);
      }
    }
  }

  // This rank's note. A note may hold what only the rank knows that has written it, so each rank gets those of all. All ranks
  // call it together.
  std::vector<std::byte> note() {
    EarlierNotes notes;
    for (std::size_t rank = 0; rank < run_.placement.ranks(); ++rank) {
      const WholeRun::Copy* const copy = run_.copy_of(rank);
      if (copy == nullptr) continue;  // the rank's records are missing, and another one has the same shard
      std::string note;
      on_all_ranks(world_, [&] {
        if (copy->seen_by != world_.rank()) return;
        const auto bytes = records_.note_of(*copy);
        note.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      });
      notes.notes.push_back(bytes_of(broadcast_text(world_, note, copy->seen_by)));
    }
    if (!own_.options.join_notes) return notes.notes[world_.rank() % notes.notes.size()];
    const std::vector<std::string> before = state_.trained();
    for (std::size_t unit = 0; unit < names_.size(); ++unit) {
      for (std::size_t tensor = 0; tensor < names_[unit].size(); ++tensor) {
        if (own_.plan.model().units[unit].tensors[tensor].frozen) continue;
        const auto place = std::ranges::find(before, names_[unit][tensor]) - before.begin();
        notes.places.push_back(static_cast<std::size_t>(place));
      }
    }
    return own_.options.join_notes(notes);
  }

  // Writes all records of the next generation. All ranks call it together: those that see records read them for those that do
  // not.
  void write(offload::RecordStore& store) {
    const HostPages memory = map_host_pages(records_under_way * store.record_bytes(), "records of a run's new ranks");
    const HostPages of_others =
        receivers_.empty() ? HostPages{} : map_host_pages(store.record_bytes(), "a record of another rank");
    std::array<offload::Completion, records_under_way> written;
    offload::InFlight under_way;  // ends before the memory does
    on_all_ranks(world_, [&] { announce(store.shape().tiles); });
    for (std::size_t record = 0; record < store.shape().tiles; ++record) {
      const std::size_t turn = record % records_under_way;
      const std::span<std::byte> bytes{memory.get() + turn * store.record_bytes(), store.record_bytes()};
      on_all_ranks(world_, [&] {
        written[turn].wait();
        std::ranges::fill(bytes, std::byte{0});  // padding between tensors
      });
      for (const std::size_t rank : receivers_)
        pass_on(record, rank, store.payload(rank == own_.rank() ? bytes : std::span(of_others.get(), bytes.size())));
      on_all_ranks(world_, [&] {
        fill(record, own_.rank(), store.payload(bytes));
        written[turn] = store.write(record, bytes);
        under_way.add(written[turn]);
      });
    }
    on_all_ranks(world_, [&] { under_way.wait(); });
  }

 private:
  // The parts of tensors in a rank's tile.
  std::vector<TensorPart> parts_in(std::size_t record, std::size_t rank) const {
    const auto [unit, tile] = own_.plan.tile_of(record);
    const UnitLayout& layout = own_.plan.layout().units[unit];
    return tensors_in(own_.plan.model().units[unit], layout, layout.trained, shard_of(own_.plan.placement(), rank),
                      layout.tiles[tile]);
  }
  const std::string& name_of(std::size_t record, const TensorPart& part) const {
    return names_[own_.plan.tile_of(record).first][part.tensor];
  }

  // The rank that reads the records of a shard for a rank of this job.
  std::size_t reader_of(std::size_t shard, std::size_t rank) const {
    const WholeRun::Copy& copy = run_.nearest(shard, sites_.of(rank));
    return copy.site == sites_.of(rank) ? rank : copy.seen_by;
  }

  // The tensors with the pieces that this rank reads for a rank's tiles. Records that these do not need are not opened.
  SavedTensors tensors_read_for(std::size_t rank, std::size_t tiles) {
    std::map<std::string, std::vector<Range>> needed;
    for (std::size_t record = 0; record < tiles; ++record) {
      for (const TensorPart& part : parts_in(record, rank))
        needed[name_of(record, part)].push_back(part.range);
    }
    return records_.tensors(state_, [&](std::size_t shard, const std::string& name, const Range& range) {
      const bool is_needed =
          reader_of(shard, rank) == own_.rank() &&
          std::ranges::any_of(needed[name], [&](const Range& each) { return intersection(each, range).count > 0; });
      return is_needed ? &run_.nearest(shard, sites_.of(rank)) : nullptr;
    });
  }

  // Reads ahead what this rank reads for others, and what it reads for itself, in the order of the tiles.
  void announce(std::size_t tiles) {
    std::vector<std::size_t> ranks(receivers_.begin(), receivers_.end());
    std::erase(ranks, own_.rank());
    ranks.push_back(own_.rank());
    std::vector<SavedPiece> wanted;
    for (const std::size_t rank : ranks)
      tensors_[rank] = tensors_read_for(rank, tiles);
    for (std::size_t record = 0; record < tiles; ++record) {
      for (const std::size_t rank : ranks) {
        for (const TensorPart& part : parts_in(record, rank))
          std::ranges::copy(tensors_[rank].at(name_of(record, part)).pieces_of(part.range), std::back_inserter(wanted));
      }
    }
    reader_.emplace(records_.files(), wanted);
  }

  // Fills a rank's tile with what this rank reads for it.
  void fill(std::size_t record, std::size_t rank, std::span<std::byte> payload) {
    const auto [unit, tile] = own_.plan.tile_of(record);
    const Range& range = own_.plan.layout().units[unit].tiles[tile];
    const TileMemory into = own_.plan.blocks().recorded(unit, tile, range.count, payload.data());
    for (const TensorPart& part : parts_in(record, rank)) {
      const std::string& name = name_of(record, part);
      reader_->copy(name, tensors_[rank].at(name), part.range.first,
                    kernels::part(into, part.in_shard - range.first, part.range.count));
    }
  }

  // Fills the tile of a rank that does not see all of its records: those that see them do it in turn.
  void pass_on(std::size_t record, std::size_t rank, std::span<std::byte> payload) {
    std::set<std::size_t> senders;
    for (const TensorPart& part : parts_in(record, rank)) {
      for (const RecordedState::Part& from : state_.parts_of(name_of(record, part), part.range))
        senders.insert(reader_of(from.shard, rank));
    }
    senders.erase(rank);
    std::ranges::fill(payload, std::byte{0});
    for (const std::size_t sender : senders) {
      on_all_ranks(world_, [&] {
        if (sender == own_.rank()) fill(record, rank, payload);
      });
      world_.broadcast(View(payload.data(), payload.size(), DType::u8), sender);
    }
  }

  const OwnRun& own_;
  const WholeRun& run_;
  const RecordedState& state_;
  EarlierRecords& records_;
  Communicator& world_;
  const Sites& sites_;
  const std::vector<std::vector<std::string>> names_;  // names of this training's tensors, for each unit
  std::set<std::size_t> receivers_{};                  // ranks that do not see all records
  std::map<std::size_t, SavedTensors> tensors_{};  // with the pieces that this rank reads, by the rank that needs them
  std::optional<PieceReader> reader_{};
};

class RunAdoption {
 public:
  RunAdoption(const OwnRun& own, Communicator& world)
      : own_(own), world_(world), first_drive_(own.options.directories.front()), search_(own, world, own.goal, &own) {}

  SettledRun settle() {
    files_ = search_.files();
    SettledRun settled{.files = {.rank = own_.rank()}};
    std::optional<WholeRun>& run = settled.run;
    if (finds_own()) {
      settled.are_there = !seen_.empty();
      if (settled.are_there) settled.files.made_in = seen_.front().files.made_in;
      if (const auto point = newest_common(seen_, last_)) run = find_whole_run(seen_, *point);
      require_chosen(run);
    } else {
      lock_others();
      find_all();
      run = newest_run();
      if (run && is_in_place(*run)) go_before_damage(*run);
      if (run && !is_in_place(*run)) run = adopt(*run);
      settled.are_there = run.has_value();
      if (run) settled.files.made_in = run->made_in;
      if (!run) remove_all_but(std::nullopt, {});
    }
    kept_ = settled.files.made_in;
    if (settled.are_there) {
      settled.run_id = known_run_id(seen_);
      settled.incarnation = std::max(next_incarnation(seen_), settled.files.made_in + 1);
    }
    settled.goes_back = last_ != own_.last();
    settled.lost = lost_;
    return settled;
  }

  void remove_others(std::span<const std::size_t> mirrored) {
    remove_all_but(kept_, mirrored);
    remove_leftovers();
  }

 private:
  // The usual case: each rank finds its own records, whose newest commit is whole, or no rank finds any. Mirrors of ranks whose
  // records are in place do not count; but a rank of which there is nothing else has lost its own.
  bool finds_own() {
    std::vector<RecordFiles> here;  // those of the site's ranks, and of ranks that this job does not have
    std::ranges::copy_if(files_, std::back_inserter(here), [&](const RecordFiles& files) {
      return !files.is_mirror && (search_.sites().has(files.rank) || files.rank >= world_.size());
    });
    const bool is_any_without = std::ranges::any_of(search_.sites().ranks(), [&](std::size_t rank) {
      return std::ranges::none_of(
          here, [&](const RecordFiles& files) { return files.rank == rank || files.rank >= world_.size(); });
    });
    seen_ = search_.find_all(is_any_without ? files_ : here);
    if (seen_.empty()) return true;
    const bool has_point = newest_common(seen_, last_) || !have_begun(seen_, last_);
    return has_point && last_ != offload::CommitPoint{} && seen_.size() == world_.size() &&
           std::ranges::all_of(seen_, [&](const SeenRecords& each) {
             return each.files == RecordFiles{each.seen_by, seen_.front().files.made_in} && each.has_newest &&
                    each.digest == own_.shape.content_digest && (!resumes_chosen() || each.has(last_));
           });
  }

  // Throws B3202 unless the run resumes where RecordOptions::resume_at says, or that says nothing.
  void require_chosen(const std::optional<WholeRun>& run) const {
    const bool begins = last_ == offload::CommitPoint{};
    const bool is_chosen = !own_.options.resume_at || (begins ? !run : run && run->point == last_);
    require(is_chosen, Code::bad_record, [&] {
      return Problem{
          .what = fmt::format("cannot resume run \"{}\" at the commit that others resume with it: records of this "
                              "commit are missing or damaged",
                              own_.name()),
          .needed = fmt::format("commit {} of incarnation {}", last_.number, last_.incarnation),
          .remedy = "Start again, which chooses another commit if there is one. Nothing was changed."};
    });
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
      auto run = newest_whole_run(seen_, own_.goal, checkpoint_, last_);
      if (!run) require_own_model();
      require_chosen(run);
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
    auto earlier = run_before_damage(run, seen_, own_, world_);
    if (!earlier) return;
    run = std::move(*earlier);
    last_ = run.point;
  }

  // --- From the records of others to this training's own.

  // Returns the run as this training keeps it; none if too many of its records are damaged, and it begins again.
  std::optional<WholeRun> adopt(WholeRun run) {
    while (true) {
      const RecordedState state = search_.state_of(run);
      EarlierRecords records(own_, run, run.shape_of(state, known_run_id(seen_)));
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

  // A commit can exist without all of its records. Returns whether that is so, and forgets such commits. Where there is another
  // copy to read, all bytes are checked, since later an error would end the adoption.
  bool drop_damaged(const WholeRun& run, EarlierRecords& records) {
    std::vector<RecordFiles> damaged;
    on_all_ranks(world_, [&] {
      for (std::size_t shard = 0; shard < run.copies.size(); ++shard) {
        const WholeRun::Copy& copy = run.nearest(shard, search_.sites().own());
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
    RunRewrite rewrite(own_, run, state, records, search_);
    const std::vector<std::byte> note = rewrite.note();
    log_adoption(run, state);
    require_joint_space(world_, shape, own_.options.directories, 1);
    std::optional<offload::RecordStore> store;
    bool is_committed = false;  // then another rank may have removed the old records already
    try {
      on_all_ranks(world_, [&] {
        offload::write_text(own_.description_file(files), own_.description);
        store.emplace(offload::RecordStore::create(shape, own_.drives(files), own_.files_of(files)));
        store->count_from({files.made_in, run.point.number});
      });
      rewrite.write(*store);
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
    run.point = last_ = store->point();
  }

  // Removes what was made after a failure, which is the error that counts.
  void remove_made(const RecordFiles& files) const {
    const auto& drives = own_.options.directories;
    for (auto drive = drives.rbegin(); drive != drives.rend(); ++drive) {
      try {
        remove_records(*drive, own_.name(), files);
      } catch (const Error&) {  // the next start removes them
      }
    }
  }

  void log_adoption(const WholeRun& run, const RecordedState& state) const {
    if (own_.options.log == nullptr || own_.rank() > 0) return;
    own_.options.log->info(
        fmt::format("takes over run \"{}\" ({:#x}) after step {} from {} rank{}, with state format {}", own_.name(),
                    known_run_id(seen_), run.step, run.placement.ranks(), run.placement.ranks() == 1 ? "" : "s",
                    name(state.format())));
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
          if (!search_.sites().looks_at(files.rank) || (files.made_in == made_in && !is_unused(files))) continue;
          const auto& drives = own_.options.directories;
          std::for_each(drives.rbegin(), drives.rend(), [&](const auto& drive) {
            remove(drive, files);  // goes from the last drive to the first: files are looked for there
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
        const auto looks_at = [&](std::size_t rank) { return search_.sites().looks_at(rank); };
        for (const auto& [files, path] : leftovers_on(drive, own_.name(), looks_at)) {
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
  std::vector<SeenRecords> seen_{};   // seen by all ranks
  KnownCheckpoint checkpoint_{};
  offload::CommitPoint last_ = own_.last();
  std::optional<LostRun> lost_{};
  std::optional<std::uint64_t> kept_{};                    // made_in of the records that this training has
  std::map<std::size_t, offload::DirectoryLock> locks_{};  // the key is the rank of the run
};

}  // namespace

SettledRun settle_run(const OwnRun& own, Communicator& world) {
  const auto adoption = std::make_shared<RunAdoption>(own, world);
  SettledRun settled = adoption->settle();
  settled.remove_others = [adoption](std::span<const std::size_t> mirrored) { adoption->remove_others(mirrored); };
  return settled;
}

}  // namespace ballast

#include "zero/runs/checkpoint.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "kernels/state_access.h"
#include "kernels/update.h"
#include "offload/run_directory.h"
#include "zero/comm/on_all_ranks.h"
#include "zero/runs/joint_space.h"
#include "zero/runs/records.h"
#include "zero/runs/resharding.h"

namespace ballast {
namespace {

constexpr const char* run_name = "checkpoint";  // the run to which the records of checkpoints belong
constexpr std::size_t most_buffers = 4;         // one is filled while others are written

std::unique_ptr<offload::IoQueue> open_queue(const RecordOptions& options, Communicator& world) {
  std::unique_ptr<offload::IoQueue> queue;
  on_all_ranks(world, [&] { queue = offload::open_queue({.depth = options.depth, .log = options.log}); });
  return queue;
}

RecordedState state_in(const std::vector<std::string>& description, const CompiledPlan& plan) {
  auto state = RecordedState::of(description, plan.names());
  require(state.has_value(), Code::internal,
          [] { return Problem{.what = "the description of a checkpoint cannot be read"}; });
  return std::move(*state);
}

// The checkpoint that this training would write, as a run of its own.
struct OwnCheckpoint {
  OwnCheckpoint(const CheckpointPlace& place, const std::string& what)
      : world(place.world),
        directory(place.directory),
        options{.directories = {directory}, .run = run_name, .allow_network = true, .log = place.log},
        queue(open_queue(options, place.world)),
        own{.plan = place.plan,
            .options = options,
            .queues = {queue.get()},
            .description = describe_checkpoint(place.plan, place.tile_elements),
            .goal =
                Goal(run_name, fmt::format("{} {}", what, directory.string()),
                     "Bring all records of one save, with the model and the rule that saved them, or choose another "
                     "directory. Nothing was changed.")},
        state(state_in(own.description, place.plan)),
        search(options, own.queues, world, own.goal, &own) {
    own.shape = state.shape();
    own.shape.rank = static_cast<std::uint32_t>(world.rank());
    own.shape.content_digest = digest_of(own.description);
  }
  OwnCheckpoint(OwnCheckpoint&&) = delete;

  std::size_t shard() const { return shard_of(own.plan.placement(), world.rank()); }

  // The range of a tile in this rank's shard of its unit.
  Range in_shard(const LocalTile& tile) const {
    const Section& trained = own.plan.layout().units[tile.unit].trained;
    return {tile.range.first - trained.shard_range(shard()).first, tile.range.count};
  }

  // The rank that writes the records of this rank's shard: the first of those that keep it.
  std::size_t writer() const {
    std::size_t rank = 0;
    while (shard_of(own.plan.placement(), rank) != shard())
      ++rank;
    return rank;
  }

  std::filesystem::path note_file(const RecordFiles& files) const {
    return files.directory(directory, run_name) / files.note_name();
  }

  Communicator& world;
  const std::filesystem::path directory;
  const RecordOptions options;
  const std::unique_ptr<offload::IoQueue> queue;
  OwnRun own;
  const RecordedState state;
  const RunSearch search;
};

// It fills records from the tiles of a training, which may be cut in another way, and writes each as soon as it is full.
class RecordFiller {
 public:
  RecordFiller(const RecordedState& state, offload::RecordStore& store) : state_(state), store_(store) {}

  // Elements of this rank's shard of a unit.
  void take(std::size_t unit, std::size_t in_shard, const TileMemory& memory) {
    std::size_t done = 0;
    for (const auto& [record, in_tile, count] : state_.stretches_of(unit, {in_shard, memory.count})) {
      Filling& filling = begun(record);
      const TileMemory tile = state_.tile(record, store_.payload(filling.buffer.bytes(store_)).data());
      kernels::copy_state(kernels::part(memory, done, count), kernels::part(tile, in_tile, count));
      done += count;
      filling.filled += count;
      if (filling.filled == state_.elements(record)) write(record);
    }
  }

  void finish() { under_way_.wait(); }

 private:
  struct Buffer {
    HostPages pages{};
    offload::Completion written{};

    std::span<std::byte> bytes(const offload::RecordStore& store) const { return {pages.get(), store.record_bytes()}; }
  };
  struct Filling {
    Buffer buffer{};
    std::size_t filled = 0;  // elements
  };

  Filling& begun(std::size_t record) {
    const auto found = filling_.find(record);
    if (found != filling_.end()) return found->second;
    Buffer buffer;
    if (written_.size() < most_buffers) {
      buffer.pages = map_host_pages(store_.record_bytes(), "records of a checkpoint");
    } else {
      buffer = std::move(written_.front());
      written_.pop_front();
      buffer.written.wait();
    }
    std::ranges::fill(buffer.bytes(store_), std::byte{0});  // padding between tensors
    return filling_.emplace(record, Filling{std::move(buffer)}).first->second;
  }

  void write(std::size_t record) {
    Buffer buffer = std::move(filling_.extract(record).mapped().buffer);
    buffer.written = store_.write(record, buffer.bytes(store_));
    under_way_.add(buffer.written);
    written_.push_back(std::move(buffer));
  }

  const RecordedState& state_;
  offload::RecordStore& store_;
  std::map<std::size_t, Filling> filling_{};  // usually one: tiles come in order, but those of several tiers may not
  std::deque<Buffer> written_{};
  offload::InFlight under_way_{};  // ends before the memory does
};

// Records of a run, and those of another model or rule, are not replaced.
void require_replaceable(const std::vector<RecordFiles>& files, const std::vector<SeenRecords>& seen,
                         const OwnCheckpoint& here) {
  on_all_ranks(here.world, [&] {
    for (const RecordFiles& each : files) {
      const auto found = here.search.found_in(each);
      require(!found || found->shape.places == 1, Code::run_mismatch, [&] {
        return Problem{.what = fmt::format("cannot {}: the run \"{}\" is there", here.own.goal.what, run_name),
                       .where = each.directory(here.directory, run_name).string(),
                       .remedy = "Save to another directory. Nothing was changed."};
      });
    }
  });
  const auto other =
      std::ranges::find_if(seen, [](const SeenRecords& each) { return each.run_id != 0 && !each.is_of_model; });
  require(other == seen.end(), Code::run_mismatch, [&] {
    return Problem{.what = fmt::format("cannot {}: the checkpoint there is {}", here.own.goal.what,
                                       other->is_described ? "of another model or rule" : "without its description"),
                   .where = fmt::format("the records of rank {}", other->files.rank),
                   .remedy = "Save to another directory, or remove the checkpoint that is there. Nothing was changed."};
  });
}

// Files of savings that were stopped may take the space that the next checkpoint needs.
void remove_incomplete(std::span<const RecordFiles> files, const std::vector<SeenRecords>& seen,
                       const OwnCheckpoint& here) {
  const auto whole = find_whole_run(seen);
  on_all_ranks(here.world, [&] {
    for (const RecordFiles& each : files) {
      if (whole && each.made_in > whole->made_in) remove_records(here.directory, run_name, each);
    }
    for (const Leftover& each : leftovers_on(here.directory, run_name)) {
      std::error_code gone;
      std::filesystem::remove(each.path, gone);
    }
  });
}

// Each rank removes what it sees: ranks that share the drive do so at the same time. Directories go when all files are gone.
void remove_all_but(const RecordFiles& current, std::span<const RecordFiles> earlier, const OwnCheckpoint& here) {
  on_all_ranks(here.world, [&] {
    for (const RecordFiles& each : earlier)
      remove_records(here.directory, run_name, each);
    remove_leftovers(here.directory, run_name, current.made_in, here.world.size());
  });
  on_all_ranks(here.world, [&] { remove_empty_directories(here.directory, run_name, here.world.size()); });
}

// The failure that came before is the error that counts.
void remove_made(const RecordFiles& files, const OwnCheckpoint& here) {
  try {
    std::error_code gone;
    std::filesystem::remove(here.note_file(files), gone);
    remove_records(here.directory, run_name, files);
  } catch (const Error&) {  // the next save removes them
  }
}

// It does work that may fail, in several parts, and keeps the first failure for an agreement.
class Attempt {
 public:
  void operator()(const std::function<void()>& work) {
    if (failure_) return;
    try {
      work();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }
  // All ranks call it together.
  void settle(Communicator& world) const {
    on_all_ranks(world, [&] {
      if (failure_) std::rethrow_exception(failure_);
    });
  }

 private:
  std::exception_ptr failure_{};
};

// Null: another rank writes what this one keeps.
void write_records(const OwnCheckpoint& here, offload::RecordStore* store,
                   const std::function<void(const TileVisitor& visitor)>& visit) {
  Attempt attempt;
  if (store != nullptr) {
    RecordFiller filler(here.state, *store);
    attempt([&] {
      visit([&](const LocalTile& tile) {
        attempt([&] { filler.take(tile.unit, here.in_shard(tile).first, tile.memory); });
      });
    });
    attempt([&] { filler.finish(); });
  }
  attempt.settle(here.world);
}

}  // namespace

void save_checkpoint(const CheckpointPlace& place, std::uint64_t step, std::span<const std::byte> note,
                     const std::function<void(const TileVisitor& visitor)>& visit) {
  OwnCheckpoint here(place, "save a checkpoint in");
  const OwnRun& own = here.own;
  std::optional<offload::RunDirectory> directory;
  std::vector<RecordFiles> earlier;
  on_all_ranks(here.world, [&] {
    std::error_code failed;
    std::filesystem::create_directories(here.directory, failed);
    if (failed) offload::fail_file("mkdir", here.directory, 0, failed.value());
    directory.emplace(RecordFiles{own.rank()}.directory(here.directory, run_name));
    earlier = record_files_on(here.directory, run_name);
  });
  const std::vector<SeenRecords> seen = here.search.find_all(earlier, SearchDepth::commits);
  require_replaceable(earlier, seen, here);
  remove_incomplete(earlier, seen, here);
  const RecordFiles files{own.rank(), next_incarnation(seen)};
  const std::uint64_t known = known_run_id(seen);
  here.own.shape.run_id = known != 0 ? known : draw_run_id(here.world);
  const bool writes = here.writer() == own.rank();
  require_joint_space(here.world, own.shape, here.options.directories, writes ? 1 : 0);
  std::optional<offload::RecordStore> store;
  bool is_committed = false;  // then another rank may have removed the earlier checkpoint already
  try {
    on_all_ranks(here.world, [&] {
      if (!writes) return write_note(here.note_file(files), note);
      write_run_description(own.description_file(files), own.description);
      store.emplace(offload::RecordStore::archive(own.shape, own.drives(files), own.files_of(files)));
      store->count_from({files.made_in, 0});
    });
    on_all_ranks(here.world, [&] {
      const auto description = own.description_file({here.writer(), files.made_in});
      require(std::filesystem::exists(description), Code::bad_argument, [&] {
        return Problem{.what = fmt::format("cannot {}: this rank does not see what rank {} writes for both",
                                           own.goal.what, here.writer()),
                       .where = description.string(),
                       .needed = "a directory that all ranks with the same state share"};
      });
    });
    write_records(here, store ? &*store : nullptr, visit);
    on_all_ranks(here.world, [&] {
      if (store) store->commit(step, note);
      is_committed = true;
    });
  } catch (...) {
    store.reset();
    if (!is_committed) remove_made(files, here);
    throw;
  }
  remove_all_but(files, earlier, here);
}

namespace {

std::vector<std::byte> note_of(const WholeRun& run, EarlierRecords& records, const OwnCheckpoint& here) {
  const std::size_t rank = here.own.rank() % run.placement.ranks();
  for (const auto& copies : run.copies) {
    for (const WholeRun::Copy& copy : copies) {
      if (copy.rank != rank || copy.seen_by != here.own.rank()) continue;
      const auto note = records.note_of(copy);
      return {note.begin(), note.end()};
    }
  }
  return read_note(here.note_file({rank, run.made_in}));
}

// Opens all records from which this rank reads, before anything is changed.
void require_all_there(const WholeRun& run, const Resharding& resharding, EarlierRecords& records,
                       const OwnCheckpoint& here) {
  const OwnRun& own = here.own;
  std::set<std::size_t> shards;
  for (std::size_t unit = 0; unit < own.plan.layout().units.size(); ++unit) {
    for (const auto& move : resharding.moves_into(unit, {0, own.plan.layout().units[unit].trained.shard}, own.rank()))
      shards.insert(move.from.shard);
  }
  for (const std::size_t shard : shards) {
    const WholeRun::Copy& copy = run.nearest(shard, own.rank());
    require(copy.seen_by == own.rank(), Code::run_mismatch, [&] {
      return Problem{
          .what = fmt::format("cannot {}: this rank does not see the records of rank {}", own.goal.what, copy.rank),
          .needed = "a directory that all ranks share, or as many ranks as saved, each with its own records"};
    });
    require(records.are_there(copy), Code::bad_record, [&] {
      return Problem{
          .what = fmt::format("cannot {}: the records of rank {} are gone or damaged", own.goal.what, copy.rank),
          .remedy = own.goal.remedy({})};
    });
  }
}

// Changes this rank's state while all ranks do the same. What fails on one rank fails on all, before drives commit.
void change_together(const StateChange& change, const TileVisitor& visitor, const LoadedCheckpoint& loaded,
                     Communicator& world) {
  Attempt attempt;
  bool has_settled = false;
  try {
    change([&](const LocalTile& tile) { attempt([&] { visitor(tile); }); },
           [&] {
             has_settled = true;
             attempt.settle(world);
             return loaded;
           });
  } catch (...) {  // a rank that cannot read its own state tells the others, which wait for it
    if (has_settled) throw;
    attempt([] { throw; });
    try {
      attempt.settle(world);
    } catch (const Error& error) {
      if (error.code() != Code::peer_failed) throw;
    }
    throw;  // the rank's own error says more than that another one failed
  }
}

}  // namespace

bool load_checkpoint(const CheckpointPlace& place, const StateChange& change) {
  OwnCheckpoint here(place, "load the checkpoint in");
  const OwnRun& own = here.own;
  std::vector<RecordFiles> files;
  on_all_ranks(here.world, [&] { files = record_files_on(here.directory, run_name); });
  const std::vector<SeenRecords> seen = here.search.find_all(files);
  const auto run = newest_whole_run(seen, own.goal);
  if (!run) return false;
  const RecordedState state = here.search.state_of(*run);
  EarlierRecords records(here.options, own.queues, *run, run->shape_of(state, known_run_id(seen)));
  Resharding resharding(own, *run, state, records);
  LoadedCheckpoint loaded{.step = run->step};
  on_all_ranks(here.world, [&] {
    require_all_there(*run, resharding, records, here);
    loaded.note = note_of(*run, records, here);
  });
  const auto fill = [&](const LocalTile& tile) {
    if (!tile.frozen)
      resharding.copy_seen(resharding.moves_into(tile.unit, here.in_shard(tile), own.rank()), tile.memory);
  };
  change_together(change, fill, loaded, here.world);
  return true;
}

}  // namespace ballast

#include "zero/runs/checkpoint.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
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
        queue(offload::open_queue({.depth = options.depth, .log = place.log})),
        own{.plan = place.plan,
            .options = options,
            .queues = {queue.get()},
            .description = describe_checkpoint(place.plan, place.tile_elements),
            .goal = Goal(run_name, fmt::format("{} {}", what, directory.string()))},
        state(state_in(own.description, place.plan)),
        search(options, own.queues, world, &own) {
    own.shape = state.shape();
    own.shape.rank = static_cast<std::uint32_t>(world.rank());
    own.shape.content_digest = digest_of(own.description);
  }
  OwnCheckpoint(OwnCheckpoint&&) = delete;

  // Of the ranks with the same shard of the state, the first one writes it.
  bool writes_records() const {
    for (std::size_t rank = 0; rank < world.rank(); ++rank) {
      if (shard_of(own.plan.placement(), rank) == shard_of(own.plan.placement(), world.rank())) return false;
    }
    return true;
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

// Fills records from the tiles of a training, which may be cut in another way, and writes each as soon as it is full.
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

void require_own_model(const std::vector<SeenRecords>& seen, const OwnCheckpoint& here) {
  const auto other =
      std::ranges::find_if(seen, [](const SeenRecords& each) { return each.run_id != 0 && !each.is_of_model; });
  require(other == seen.end(), Code::run_mismatch, [&] {
    return Problem{.what = fmt::format("cannot {}: a checkpoint of another model or rule is there", here.own.goal.what),
                   .where = fmt::format("the records of rank {}", other->files.rank),
                   .remedy = "Save to another directory, or remove the checkpoint that is there. Nothing was changed."};
  });
}

// Each rank removes what it sees: ranks that share the drive may do so at the same time.
void remove_all_but(const RecordFiles& current, std::span<const RecordFiles> earlier, const OwnCheckpoint& here) {
  on_all_ranks(here.world, [&] {
    for (const RecordFiles& each : earlier)
      remove_records(here.directory, run_name, each);
    remove_leftovers(here.directory, run_name, current.made_in, here.world.size());
    for (const RecordFiles& each : earlier) {
      if (each.rank >= here.world.size()) remove_empty_directory(here.directory, run_name, each);
    }
  });
}

// After a failure, which is the error that counts.
void remove_made(const RecordFiles& files, const OwnCheckpoint& here) {
  try {
    std::error_code gone;
    std::filesystem::remove(here.note_file(files), gone);
    remove_records(here.directory, run_name, files);
  } catch (const Error&) {  // the next save removes them
  }
}

// Runs work that may throw, such as one step of several; the first failure is kept for an agreement.
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
  require_own_model(seen, here);
  const RecordFiles files{own.rank(), next_incarnation(seen)};
  const std::uint64_t known = known_run_id(seen);
  here.own.shape.run_id = known != 0 ? known : draw_run_id(here.world);
  const bool writes = here.writes_records();
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
    Attempt attempt;
    {
      std::optional<RecordFiller> filler;
      if (store) filler.emplace(here.state, *store);
      attempt([&] {
        visit([&](const LocalTile& tile) {
          if (!filler || tile.frozen) return;
          const Section& trained = own.plan.layout().units[tile.unit].trained;
          const std::size_t shard = shard_of(own.plan.placement(), own.rank());
          filler->take(tile.unit, tile.range.first - trained.shard_range(shard).first, tile.memory);
        });
        if (filler) filler->finish();
      });
      attempt.settle(here.world);
    }
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

// Which rank's note this rank gets: with more ranks than saved, each earlier one has several.
std::size_t noted(const WholeRun& run, std::size_t rank) { return rank % run.placement.ranks(); }

std::vector<std::byte> note_of(const WholeRun& run, EarlierRecords& records, const OwnCheckpoint& here) {
  const std::size_t rank = noted(run, here.own.rank());
  for (const auto& copies : run.copies) {
    for (const WholeRun::Copy& copy : copies) {
      if (copy.rank != rank || copy.seen_by != here.own.rank()) continue;
      const auto note = records.note_of(copy);
      return {note.begin(), note.end()};
    }
  }
  return read_note(here.note_file({rank, run.made_in}));
}

void require_all_seen(const Resharding& resharding, const OwnCheckpoint& here) {
  const OwnRun& own = here.own;
  for (std::size_t unit = 0; unit < own.plan.layout().units.size(); ++unit) {
    for (const auto& move : resharding.moves_into(unit, {0, own.plan.layout().units[unit].trained.shard}, own.rank())) {
      require(resharding.sees(own.rank(), move.from.shard), Code::run_mismatch, [&] {
        return Problem{
            .what =
                fmt::format("cannot {}: this rank does not see the records of rank {}", own.goal.what, move.from.shard),
            .needed = "a directory that all ranks share, or as many ranks as saved, each with its own records"};
      });
    }
  }
}

}  // namespace

void load_checkpoint(const CheckpointPlace& place, const StateChange& change) {
  OwnCheckpoint here(place, "load the checkpoint in");
  const OwnRun& own = here.own;
  std::vector<RecordFiles> files;
  on_all_ranks(here.world, [&] { files = record_files_on(here.directory, run_name); });
  const std::vector<SeenRecords> seen = here.search.find_all(files);
  const auto run = newest_whole_run(seen, own.goal);
  require(run.has_value(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot load a checkpoint: there is none in {}", here.directory.string()),
                   .needed = "a directory of Training::save()"};
  });
  const RecordedState state = here.search.state_of(*run);
  offload::RecordShape shape = state.shape();
  shape.run_id = known_run_id(seen);
  shape.content_digest = run->digest;
  EarlierRecords records(here.options, own.queues, *run, shape);
  Resharding resharding(own, *run, state, records);
  LoadedCheckpoint loaded{.step = run->step};
  on_all_ranks(here.world, [&] {
    require_all_seen(resharding, here);
    loaded.note = note_of(*run, records, here);
  });
  Attempt attempt;
  bool has_settled = false;
  const auto change_all = [&] {
    change(
        [&](const LocalTile& tile) {
          if (tile.frozen) return;
          attempt([&] {
            const Section& trained = own.plan.layout().units[tile.unit].trained;
            const std::size_t shard = shard_of(own.plan.placement(), own.rank());
            const Range range{tile.range.first - trained.shard_range(shard).first, tile.range.count};
            resharding.copy_seen(resharding.moves_into(tile.unit, range, own.rank()), tile.memory);
          });
        },
        [&] {
          has_settled = true;
          attempt.settle(here.world);
          return loaded;
        });
  };
  try {
    change_all();
  } catch (...) {  // a rank that cannot read its own state tells the others, which wait for it
    if (has_settled) throw;
    attempt([] { throw; });
    attempt.settle(here.world);
  }
}

}  // namespace ballast

#include "zero/records.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/runtime/error.h"
#include "offload/checksum.h"

namespace ballast {
namespace {

// The same in every build and on every machine: it stands in the files.
std::uint64_t run_id_of(const std::string& run, std::size_t rank) {
  return offload::checksum(std::as_bytes(std::span(run)), rank);
}

// What every rank says, by rank.
std::vector<std::int64_t> said_by_all(Communicator& world, std::int64_t mine) {
  std::vector<std::int64_t> values(world.size());
  values[world.rank()] = mine;
  world.all_reduce(values);
  return values;
}

// How far a rank's records have come.
enum class Has : std::int64_t { nothing, files, first_step, steps };

Has what_there_is(const offload::RecordStore& store) {
  constexpr std::uint64_t made = 1;  // the generation of a store that was never filled
  if (store.generation() == made) return Has::files;
  return store.step() == 0 ? Has::first_step : Has::steps;
}

// Whether all have something to go on from. A run that was killed while it began has nothing; one of whose ranks is lost
// has.
bool can_go_on(const std::vector<std::int64_t>& by_rank, const std::string& run) {
  const auto least = std::ranges::min_element(by_rank);
  const bool whole = *least >= static_cast<std::int64_t>(Has::first_step);
  require(whole || std::ranges::count(by_rank, static_cast<std::int64_t>(Has::steps)) == 0, Code::bad_record, [&] {
    return Problem{.what = fmt::format("run {} is on the drives of some ranks only", run),
                   .where = fmt::format("rank {} has nothing of it", least - by_rank.begin()),
                   .remedy = "Give every rank its own directories again, or begin a run of another name."};
  });
  return whole;
}

}  // namespace

Records::Records(const Plan& plan, Communicator& world, const RecordOptions& options) {
  require(!options.directories.empty(), Code::bad_argument,
          [] { return Problem{.what = "state was to be kept on drives", .needed = "the directories to keep it in"}; });
  require(options.run.empty() || plan.blocks().whole_records(), Code::internal,
          [] { return Problem{.what = "a run was to be kept in records without parameters"}; });
  const std::uint64_t run_id = run_id_of(options.run, world.rank());
  const offload::RecordShape shape = plan.blocks().shape(run_id, plan.tiles_on_drive());
  for (const std::filesystem::path& directory : options.directories) {
    std::filesystem::path place = directory;
    if (!options.run.empty()) {
      std::filesystem::create_directories(directory);
      place = kept_.emplace_back(directory / fmt::format("{}-rank-{}", options.run, world.rank())).path();
    }
    queues_.push_back(offload::open_queue({.depth = options.depth, .log = options.log}));
    drives_.push_back({place, queues_.back().get()});
  }
  const offload::StoreOptions files{.file = {.allow_network = options.allow_network}, .log = options.log};
  if (options.run.empty()) {
    store_.emplace(offload::RecordStore::scratch(shape, drives_, files));
    return;
  }
  const bool there = std::filesystem::exists(drives_.front().directory / "state.records");
  store_.emplace(there ? offload::RecordStore::open(shape, drives_, files)
                       : offload::RecordStore::create(shape, drives_, files));
  const Has mine = there ? what_there_is(*store_) : Has::nothing;
  found_ = can_go_on(said_by_all(world, static_cast<std::int64_t>(mine)), options.run);
  if (found_) go_to_common_step(shape, world, files);
}

// A rank may have committed one step more than another when a run ended; it has the step before as well.
void Records::go_to_common_step(const offload::RecordShape& shape, Communicator& world,
                                const offload::StoreOptions& options) {
  const auto steps = said_by_all(world, static_cast<std::int64_t>(store_->step()));
  const auto common = static_cast<std::uint64_t>(*std::ranges::min_element(steps));
  if (store_->step() == common) return;
  store_.reset();
  offload::StoreOptions older = options;
  older.newest_step = common;
  store_.emplace(offload::RecordStore::open(shape, drives_, older));
  require(store_->step() == common, Code::bad_record, [&] {
    return Problem{.what = "ranks have no committed step in common",
                   .where = fmt::format("rank {}", world.rank()),
                   .needed = fmt::format("step {}", common),
                   .available = fmt::format("step {}", store_->step())};
  });
}

std::vector<offload::IoQueue*> Records::queues() const {
  std::vector<offload::IoQueue*> queues;
  for (const auto& queue : queues_)
    queues.push_back(queue.get());
  return queues;
}

}  // namespace ballast

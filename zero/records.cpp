#include "zero/records.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "kernels/runtime/error.h"

namespace ballast {
namespace {

// What every rank says, by rank.
std::vector<std::int64_t> said_by_all(Communicator& world, std::int64_t mine) {
  std::vector<std::int64_t> values(world.size());
  values[world.rank()] = mine;
  world.all_reduce(values);
  return values;
}

void require_all_or_none(const std::vector<std::int64_t>& found, const std::string& run) {
  const auto missing = std::ranges::find(found, 0);
  require(missing == found.end() || std::ranges::count(found, 0) == std::ssize(found), Code::bad_record, [&] {
    return Problem{.what = fmt::format("run {} is on the drives of some ranks only", run),
                   .where = fmt::format("rank {} has nothing of it", missing - found.begin()),
                   .remedy = "Give every rank its own directories again, or begin a run of another name."};
  });
}

}  // namespace

Records::Records(const Plan& plan, Communicator& world, const RecordOptions& options) {
  require(!options.directories.empty(), Code::bad_argument,
          [] { return Problem{.what = "state was to be kept on drives", .needed = "the directories to keep it in"}; });
  const std::uint64_t run_id = std::hash<std::string>{}(fmt::format("{}/{}", options.run, world.rank()));
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
  const auto there = said_by_all(world, std::filesystem::exists(drives_.front().directory / "state.records") ? 1 : 0);
  require_all_or_none(there, options.run);
  if (there.front() == 1) {
    find(shape, world, files);
  } else {
    store_.emplace(offload::RecordStore::create(shape, drives_, files));
  }
}

// A rank may have committed one step more than another when a run ended; it has the step before as well.
void Records::find(const offload::RecordShape& shape, Communicator& world, const offload::StoreOptions& options) {
  constexpr std::uint64_t made = 1;  // the generation of a store that was made and never filled
  store_.emplace(offload::RecordStore::open(shape, drives_, options));
  const auto filled = said_by_all(world, store_->generation() > made ? 1 : 0);
  found_ = std::ranges::count(filled, 0) == 0;
  if (!found_) return;  // killed before it had begun
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

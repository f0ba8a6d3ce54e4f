#include "zero/engine/state_visitor.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <optional>

namespace ballast {
namespace {

constexpr std::size_t frozen_stretch = std::size_t{1} << 20;  // elements that are visited together; of whole groups

LocalTile without_memory(const Home& home) {
  return {.unit = home.unit, .range = home.range, .memory = {}, .frozen = home.tile == none || home.frozen};
}

}  // namespace

void StateVisitor::look(const TileVisitor& visit, const TileFilter& which) const { visit_tiles(visit, false, which); }

// Fails on all ranks if it fails on one. Otherwise the other ranks would commit what follows under a name that this
// rank gives to another state later. A rank throws its own error, which says more than the one that the others get.
void StateVisitor::do_on_all_ranks(const std::function<void()>& work) const {
  std::exception_ptr own;
  try {
    work();
  } catch (...) {
    own = std::current_exception();
  }
  std::vector<std::size_t> failed;
  try {
    failed = parts_.mesh.where(own != nullptr);
  } catch (...) {
    if (!own) throw;
  }
  if (own) std::rethrow_exception(own);
  require(failed.empty(), Code::peer_failed, [&] {
    return Problem{.what = fmt::format("rank {} cannot change the state of the run, so no rank changes it",
                                       fmt::join(failed, ", ")),
                   .remedy = "Look at the error of that rank. The last commit is as it was."};
  });
}

// A rank overwrites the generation before the last one here, so all ranks must have committed the last one. Otherwise a
// crash could leave them without a commit in common.
void StateVisitor::change(const TileVisitor& visit, const std::function<void()>& agree,
                          const std::function<CommittedState()>& committed) const {
  const auto visit_all = [&] { visit_tiles(visit, true, [](const LocalTile&) { return true; }); };
  const bool of_run = parts_.records != nullptr && parts_.records->keeps_run();
  if (of_run) parts_.mesh.barrier();
  try {
    of_run ? do_on_all_ranks(visit_all) : visit_all();
    of_run ? do_on_all_ranks(agree) : agree();
  } catch (...) {
    if (parts_.records != nullptr) parts_.records->abandon();
    throw;
  }
  if (plan().tiles_on_drive() > 0) parts_.records->commit(committed());
}

void StateVisitor::visit_tiles(const TileVisitor& visit, bool changes, const TileFilter& which) const {
  RecordsMemory records(parts_.running, parts_.slots);
  Staging staging = parts_.homes.staging(largest_bytes(which));
  for (const Home& home : local_homes()) {
    if (!which(without_memory(home))) continue;
    if (home.tile == none) {
      visit_frozen(home, visit, changes, staging);
    } else if (home.on_drive) {
      visit_record(home, visit, changes, {records.of(home), staging});
    } else {
      visit_memory(home, visit, changes, staging);
    }
  }
  staging.finish();
  records.finish();
}

// Returns the bytes of the largest home that is visited. Each is copied alone.
std::size_t StateVisitor::largest_bytes(const TileFilter& which) const {
  std::size_t largest = 0;
  for (const Home& home : local_homes()) {
    if (!which(without_memory(home))) continue;
    const std::size_t parameters = home.range.count * byte_size(plan().model().units[home.unit].dtype);
    const bool has_state = home.tile != none && !home.frozen;
    const std::size_t state =
        has_state ? plan().blocks().state(home.unit, home.tile).layout_of(home.range.count).bytes() : 0;
    largest = std::max(largest, parameters + state);
  }
  return largest;
}

// Returns tiles on drives, and those in memory and frozen parameters there in stretches. Frozen ones come once, though several
// homes may hold them.
std::vector<Home> StateVisitor::local_homes() const {
  std::vector<Home> homes;
  std::size_t seen = none;  // unit whose frozen parameters are among them
  for (const Home& home : parts_.running.program().homes) {
    if (home.tile != none) {
      const std::vector<Home> parts = home.on_drive ? std::vector{home} : parts_.homes.stretches_of(home);
      homes.insert(homes.end(), parts.begin(), parts.end());
      continue;
    }
    const Section& frozen = plan().layout().units[home.unit].frozen;
    const Range range = intersection(home.range, {frozen.first, frozen.count()});
    if (range.count == 0 || seen == home.unit) continue;
    seen = home.unit;
    for (std::size_t first = range.first; first < range.end(); first += frozen_stretch) {
      homes.push_back({.unit = home.unit, .range = {first, std::min(frozen_stretch, range.end() - first)}});
    }
  }
  return homes;
}

std::vector<LocalTile> StateVisitor::tiles() const {
  std::vector<LocalTile> tiles;
  std::ranges::transform(local_homes(), std::back_inserter(tiles), without_memory);
  return tiles;
}

TileMemory StateVisitor::frozen_memory(const Home& home, std::byte* parameter) const {
  return {.parameter_dtype = plan().model().units[home.unit].dtype,
          .parameter = parameter,
          .count = home.range.count,
          .first_index = home.range.first};
}

void StateVisitor::visit_frozen(const Home& home, const TileVisitor& visit, bool changes, Staging& staging) const {
  const HomeMemory::OnHost parameter(parts_.homes, parts_.homes.parameters_of(home), staging);
  visit({home.unit, home.range, frozen_memory(home, parameter.data()), true});
  if (changes) parts_.homes.keep_parameters(home, parameter.data(), staging);
}

void StateVisitor::visit_memory(const Home& home, const TileVisitor& visit, bool changes, Staging& staging) const {
  const Piece at = parts_.homes.parameters_of(home);
  const HomeMemory::OnHost parameter(parts_.homes, at, staging);
  HomeMemory::StateOnHost state(parts_.homes, home, staging);
  TileMemory memory = state.memory();
  memory.parameter = parameter.data();
  visit({home.unit, home.range, memory});
  if (!changes) return;
  if (parameter.is_copy()) parts_.homes.put(at, parameter.data(), staging);
  state.put_back();
  parts_.homes.keep_parameters(home, parameter.data(), staging);
}

void StateVisitor::visit_record(const Home& home, const TileVisitor& visit, bool changes, const Memory& memory) const {
  const std::span<std::byte> record = memory.records.next();
  const std::span<std::byte> block = parts_.records->read(home.unit, home.tile, record).payload();
  if (home.frozen) {
    visit({home.unit, home.range, frozen_memory(home, block.data()), true});
    if (changes) memory.records.is_written_by(parts_.records->write(home.unit, home.tile, record));
    return;
  }
  TileMemory tile = plan().blocks().recorded(home.unit, home.tile, home.range.count, block.data());
  const Piece in_memory = tile.parameter != nullptr ? Piece{} : parts_.homes.parameters_of(home);
  const HomeMemory::OnHost copy(parts_.homes, in_memory, memory.staging);
  if (in_memory.exists()) tile.parameter = copy.data();
  tile.first_index = home.range.first;
  visit({home.unit, home.range, tile});
  if (!changes) return;
  parts_.homes.keep_parameters(home, tile.parameter, memory.staging);
  memory.records.is_written_by(parts_.records->write(home.unit, home.tile, record));
}

}  // namespace ballast

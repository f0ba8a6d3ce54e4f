// What a rank keeps between steps, for its owner to look at and to change.
#include <algorithm>
#include <exception>
#include <iterator>

#include "kernels/runtime/error.h"
#include "zero/engine/engine.h"
#include "zero/engine/record_memory.h"

namespace ballast {
namespace {

constexpr std::size_t frozen_stretch = std::size_t{1} << 20;  // elements that are looked at together; of whole groups

// A piece in host memory: itself, or a copy of what is on a GPU.
class OnHost {
 public:
  OnHost(const Slots& slots, const Piece& piece, const ExecContext& gpu)
      : copy_(slots.on_gpu(piece) ? piece.bytes : 0), data_(copy_.empty() ? slots.data(piece) : copy_.data()) {
    if (copy_.empty()) return;
    gpu.copy(data_, slots.data(piece), piece.bytes);
    gpu.finish();
  }
  OnHost(OnHost&&) = delete;

  std::byte* data() const { return data_; }
  bool is_copy() const { return !copy_.empty(); }

 private:
  std::vector<std::byte> copy_;
  std::byte* data_;
};

LocalTile without_memory(const Home& home) {
  return {.unit = home.unit, .range = home.range, .memory = {}, .frozen = home.tile == none};
}

}  // namespace

void Engine::look_at_state(const TileVisitor& look, const TileFilter& which) { visit_state(look, false, which); }

void Engine::parameters_changed() {
  finish();
  if (corruption_check_) corruption_check_->forget();
}

// Fails on all ranks where it fails on one: elsewhere what follows would be committed under a name that this rank gives to
// another state later. A rank's own error says more than what the others are told.
void Engine::do_together(const std::function<void()>& work) {
  std::exception_ptr own;
  try {
    work();
  } catch (...) {
    own = std::current_exception();
  }
  bool failed_elsewhere = false;
  try {
    failed_elsewhere = parts_.mesh.is_any(own != nullptr);
  } catch (...) {
    if (!own) throw;
  }
  if (own) std::rethrow_exception(own);
  require(!failed_elsewhere, Code::peer_failed, [] {
    return Problem{.what = "another rank cannot change the state of the run, so no rank changes it",
                   .remedy = "Look at the error of that rank. The last commit is as it was."};
  });
}

// What is gathered, or kept of records, is made again. A rank overwrites the generation before the last one here, so all ranks
// must have committed the last one: else a crash could leave them without a commit in common.
void Engine::change_state(const TileVisitor& change, const std::function<void()>& agree) {
  parameters_changed();
  const auto visit = [&] { visit_state(change, true, [](const LocalTile&) { return true; }); };
  const bool of_run = records_ && records_->keeps_run();
  if (of_run) parts_.mesh.barrier();
  try {
    of_run ? do_together(visit) : visit();
    of_run ? do_together(agree) : agree();
  } catch (...) {
    if (records_) records_->abandon();
    throw;
  }
  if (parts_.plan.tiles_on_drive() > 0) records_->commit(steps_);
  run_entry(true);
}

void Engine::visit_state(const TileVisitor& visit, bool changes, const TileFilter& which) {
  finish();
  std::optional<RecordMemory> records;
  if (parts_.plan.tiles_on_drive() > 0) records.emplace(program(), slots_);
  for (const Home& home : own_homes()) {
    if (!which(without_memory(home))) continue;
    if (home.tile == none) {
      visit_frozen(home, visit, changes);
    } else {
      home.on_drive ? visit_record(home, visit, changes, *records) : visit_memory(home, visit, changes);
    }
  }
  if (records) records->finish();
}

// Tiles, and frozen parameters in stretches: those once, though they may lie in several places.
std::vector<Home> Engine::own_homes() const {
  std::vector<Home> own;
  std::size_t seen = none;  // unit whose frozen parameters are among them
  for (const Home& home : program().homes) {
    if (home.tile != none) {
      own.push_back(home);
      continue;
    }
    const Section& frozen = parts_.plan.layout().units[home.unit].frozen;
    const Range range = intersection(home.range, {frozen.first, frozen.count()});
    if (range.count == 0 || seen == home.unit) continue;
    seen = home.unit;
    for (std::size_t first = range.first; first < range.end(); first += frozen_stretch) {
      own.push_back({.unit = home.unit, .range = {first, std::min(frozen_stretch, range.end() - first)}});
    }
  }
  return own;
}

std::vector<LocalTile> Engine::own_tiles() const {
  std::vector<LocalTile> own;
  std::ranges::transform(own_homes(), std::back_inserter(own), without_memory);
  return own;
}

// In memory; beside state on the device, where the unit's parameters are kept.
Piece Engine::parameters_of(const Home& tile) const {
  if (tile.parameters.exists()) return tile.parameters;
  const std::size_t width = byte_size(parts_.plan.model().units[tile.unit].dtype);
  for (const Home& kept : program().homes) {
    if (kept.unit != tile.unit || kept.tile != none || intersection(kept.range, tile.range) != tile.range) continue;
    return kept.parameters.part((tile.range.first - kept.range.first) * width, tile.range.count * width);
  }
  fail(Code::internal, {.what = "a tile's parameter is nowhere"});
}

LocalTile Engine::own_tile(const Home& home, std::byte* parameter, std::byte* state) const {
  kernels::UpdateTile memory = parts_.plan.blocks().state(home.unit).tile(state);
  memory.parameter = parameter;
  memory.count = home.range.count;
  memory.first_index = home.range.first;
  return {home.unit, home.range, memory};
}

void Engine::visit_frozen(const Home& home, const TileVisitor& visit, bool changes) {
  const OnHost parameter(slots_, parameters_of(home), arithmetic(Lane::upload).context());
  visit({.unit = home.unit,
         .range = home.range,
         .memory = {.parameter_dtype = parts_.plan.model().units[home.unit].dtype,
                    .parameter = parameter.data(),
                    .count = home.range.count,
                    .first_index = home.range.first},
         .frozen = true});
  if (changes) keep_parameters(home, parameter.data());
}

void Engine::visit_memory(const Home& home, const TileVisitor& visit, bool changes) {
  const ExecContext& context = arithmetic(Lane::upload).context();
  const Piece at = parameters_of(home);
  const OnHost parameter(slots_, at, context);
  const OnHost state(slots_, home.state, context);
  visit(own_tile(home, parameter.data(), state.data()));
  if (!changes) return;
  if (parameter.is_copy()) put(at, parameter.data());
  if (state.is_copy()) put(home.state, state.data());
  keep_parameters(home, parameter.data());
}

void Engine::visit_record(const Home& home, const TileVisitor& visit, bool changes, RecordMemory& memory) {
  const std::span<std::byte> record = memory.next();
  const std::span<std::byte> block = records_->read(home.unit, home.tile, record).payload();
  const BlockSizes sizes = parts_.plan.blocks().in_record(home.unit);
  const Piece in_memory = sizes.parameter > 0 ? Piece{} : parameters_of(home);
  const OnHost copy(slots_, in_memory, arithmetic(Lane::upload).context());
  std::byte* const parameter = in_memory.exists() ? copy.data() : block.data();
  visit(own_tile(home, parameter, block.data() + sizes.parameter));
  if (!changes) return;
  keep_parameters(home, parameter);
  memory.is_written_by(records_->write(home.unit, home.tile, record));
}

// Wherever a tile's parameter is kept beside its state.
void Engine::keep_parameters(const Home& tile, const std::byte* from) {
  const std::size_t width = byte_size(parts_.plan.model().units[tile.unit].dtype);
  for (const Home& kept : program().homes) {
    const Range common = intersection(kept.range, tile.range);
    if (kept.unit != tile.unit || !kept.parameters.exists() || common.count == 0) continue;
    const Piece to = kept.parameters.part((common.first - kept.range.first) * width, common.count * width);
    const std::byte* const values = from + (common.first - tile.range.first) * width;
    if (slots_.data(to) != values) put(to, values);
  }
}

void Engine::read_memory(const ConstView& view, std::byte* into) const {
  if (view.data() == into) return;
  const ExecContext& context = arithmetic(Lane::upload).context();
  context.copy(into, view.data(), view.bytes());
  context.finish();
}

View Engine::whole_parameters(std::size_t unit) {
  const auto whole = std::ranges::find_if(program().homes, [&](const Home& home) {
    return home.unit == unit && home.tile == none && home.range.count == parts_.plan.layout().units[unit].elements();
  });
  require(whole != program().homes.end(), Code::bad_argument, [&] {
    return Problem{.what = "whole parameters were asked for where they are gathered on demand",
                   .where = "unit " + parts_.plan.model().units[unit].name,
                   .needed = "a lease of the unit, or a stage below 3"};
  });
  return slots_.view(whole->parameters, parts_.plan.model().units[unit].dtype);
}

}  // namespace ballast

#include "zero/plan/compile.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/runtime/error.h"
#include "zero/plan/compiler.h"

namespace ballast {

Compiler::Compiler(const CompileInput& input, const Trace& of_program, const Trace& trace)
    : in_(input),
      of_program_(of_program),
      trace_(trace),
      uses_(trace, input.model.units.size()),
      slots_(input, of_program, Uses(of_program, input.model.units.size())),
      on_drive_(tiles_on_drive(order_of_updates(Uses(of_program, input.model.units.size())))),
      has_records_(!on_drive_.empty()),
      builder_(slots_.all()),
      gathered_(slots_.gathered_slot() == none ? 0 : slots_.gathered_bytes(), uses_) {
  for (std::size_t i = 0; i < slots_.kept.size(); ++i) {
    kept_[on_drive_[i]] = slots_.kept[i];
  }
}

// That of the next forward, or that in which gradients are complete.
std::vector<std::size_t> Compiler::order_of_updates(const Uses& uses) const {
  std::vector<std::size_t> units = uses.by_first_visit();
  if (in_.schedule.update_in_backward) {
    std::ranges::stable_sort(units, {}, [&](std::size_t unit) { return uses.last_backward(unit); });
  }
  return units;
}

std::vector<Compiler::TileName> Compiler::tiles_on_drive(const std::vector<std::size_t>& units) const {
  std::vector<TileName> tiles;
  for (const std::size_t unit : units) {
    const std::vector<Tier>& tiers = slots_.residence(unit).state;
    for (std::size_t tile = 0; tile < tiers.size(); ++tile) {
      if (tiers[tile] == Tier::nvme) tiles.push_back({unit, tile});
    }
  }
  return tiles;
}

std::vector<Home> Compiler::homes() const {
  std::vector<Home> homes;
  for (std::size_t unit = 0; unit < in_.model.units.size(); ++unit) {
    add_kept_parameters(unit, homes);
    for (std::size_t tile = 0; tile < in_.layout.units[unit].tiles.size(); ++tile) {
      homes.push_back(home_of_tile(unit, tile));
    }
  }
  return homes;
}

// Those that are kept beside the tiles' blocks and records.
void Compiler::add_kept_parameters(std::size_t unit, std::vector<Home>& homes) const {
  const UnitLayout& layout = in_.layout.units[unit];
  const UnitSlots& slots = slots_.of(unit);
  const auto add = [&](const Range& range, std::size_t slot, std::size_t begin) {
    if (range.count == 0 || slot == none) return;
    homes.push_back(
        {.unit = unit, .range = range, .parameters = {slot, begin * width(unit), range.count * width(unit)}});
  };
  const Range trained = layout.trained.of_rank(in_.rank_in_shard_group);
  const Range frozen = layout.frozen.of_rank(in_.rank_in_shard_group);
  if (slots_.comes_and_goes(unit)) {
    add(trained, slots.parameters, 0);
    add(frozen, slots.parameters, trained.count);
  } else {
    add({0, layout.elements()}, slots.parameters, 0);
  }
  add(frozen, slots.frozen, 0);
}

Home Compiler::home_of_tile(std::size_t unit, std::size_t tile) const {
  const UnitLayout& layout = in_.layout.units[unit];
  const auto [first, count] = layout.tiles[tile];
  Home home{
      .unit = unit, .tile = tile, .range = {layout.trained.of_rank(in_.rank_in_shard_group).first + first, count}};
  const UnitSlots& slots = slots_.of(unit);
  switch (slots_.residence(unit).state[tile]) {
    case Tier::device: home.state = slots.state[tile]; break;
    case Tier::host:
      home.parameters = slots.blocks[tile].part(0, count * width(unit));
      home.state = slots.blocks[tile].part(in_.blocks.of(unit).parameter, in_.blocks.of(unit).state);
      break;
    case Tier::nvme:
      home.on_drive = true;
      if (slots.copies[tile].exists()) home.parameters = slots.copies[tile].part(0, count * width(unit));
      break;
  }
  return home;
}

Program Compiler::outline() const { return {.slots = slots_.all(), .homes = homes(), .entry = {}, .ops = {}}; }

// A round begins with what the one before left: so what one waits for is seen in the second of two.
Program Compiler::run() && {
  Program program = outline();
  entry();
  program.entry = builder_.round(0, 0);
  builder_ = Builder(slots_.all());
  round();
  const std::size_t second = builder_.size();
  round();
  program.ops = builder_.round(0, second);
  return program;
}

void Compiler::entry() {
  slots_.restart();
  current_.assign(in_.model.units.size(), true);
  for (std::size_t unit = 0; unit < in_.model.units.size(); ++unit) {
    gather_whole(unit);
  }
  for (std::size_t i = 0; i < slots_.kept.size(); ++i) {
    const TileName& name = on_drive_[i];
    builder_.add(
        {.kind = OpKind::read, .lane = Lane::disk, .unit = name.unit, .tile = name.tile, .to = slots_.kept[i]});
  }
  hoist();
}

void Compiler::begin_round() {
  slots_.restart();
  gradients_.clear();
  sums_done_.assign(in_.model.units.size(), 0);
  summed_.assign(in_.model.units.size(), {});
  agreed_ = none;
  current_.assign(in_.model.units.size(), false);
  staging_.clear();
  tiles_read_ = 0;
  tiles_updated_ = 0;
  hoisted_ = 0;
}

void Compiler::round() {
  begin_round();
  for (std::size_t micro_step = 0; micro_step < in_.micro_steps; ++micro_step) {
    for (std::size_t position = 0; position < trace_.size(); ++position) {
      visit(micro_step, position);
    }
  }
  step();
}

std::size_t Compiler::width(std::size_t unit) const { return byte_size(in_.model.units[unit].dtype); }

Piece Compiler::whole_parameters(std::size_t unit) const {
  const std::size_t bytes = slots_.whole_bytes(unit);
  if (!slots_.comes_and_goes(unit)) return {slots_.of(unit).parameters, 0, bytes};
  return {slots_.gathered_slot(), *gathered_.find(unit), bytes};
}

Piece Compiler::section(std::size_t unit, const Section& section) const {
  return whole_parameters(unit).part(section.first * width(unit), section.count() * width(unit));
}

Piece Compiler::own_shard(std::size_t unit, const Section& section) const {
  const Range shard = section.of_rank(in_.rank_in_shard_group);
  return whole_parameters(unit).part(shard.first * width(unit), shard.count * width(unit));
}

Piece Compiler::kept_shard(std::size_t unit, const Section& section) const {
  if (!slots_.comes_and_goes(unit)) return own_shard(unit, section);
  const std::size_t before = section.first == 0 ? 0 : in_.layout.units[unit].trained.shard;
  return {slots_.of(unit).parameters, before * width(unit), section.shard * width(unit)};
}

// Whether a unit's parameters are there at `position`, or could be brought.
bool Compiler::bring(std::size_t unit, std::size_t now, std::size_t position) {
  if (!slots_.comes_and_goes(unit) || gathered_.find(unit)) return true;
  if (!gathered_.place(unit, slots_.whole_bytes(unit), now, position)) return false;
  gather(unit, trace_[position % trace_.size()].phase);
  return true;
}

void Compiler::gather(std::size_t unit, Phase phase) {
  const bool on_device = slots_.residence(unit).parameters == Tier::device;
  if (!on_device) upload_shard(unit, phase);
  for (const Section* section : {&in_.layout.units[unit].trained, &in_.layout.units[unit].frozen}) {
    if (section->shard == 0 || section->shards == 1) continue;
    builder_.add({.kind = OpKind::gather,
                  .lane = Lane::gather,
                  .phase = phase,
                  .unit = unit,
                  .from = on_device ? kept_shard(unit, *section) : own_shard(unit, *section),
                  .to = this->section(unit, *section)});
  }
}

// From the host, or from records, to its place among the whole parameters.
void Compiler::upload_shard(std::size_t unit, Phase phase) {
  const UnitLayout& layout = in_.layout.units[unit];
  const bool on_drive = slots_.residence(unit).parameters == Tier::nvme;
  const auto upload = [&](std::size_t tile, const Piece& from, const Piece& to) {
    builder_.add({.kind = OpKind::upload,
                  .lane = Lane::upload,
                  .phase = phase,
                  .unit = unit,
                  .tile = tile,
                  .from = from,
                  .to = to});
  };
  for (std::size_t tile = 0; tile < layout.tiles.size(); ++tile) {
    const std::size_t bytes = layout.tiles[tile].count * width(unit);
    const Piece to = own_shard(unit, layout.trained).part(layout.tiles[tile].first * width(unit), bytes);
    if (on_drive) {
      const Piece record = slots_.first_regions.next();
      fetch({unit, tile}, phase, record);
      upload(tile, record.part(in_.blocks.records().payload, bytes), to);
    } else {
      const UnitSlots& slots = slots_.of(unit);
      const bool in_block = slots_.residence(unit).state[tile] == Tier::host;
      upload(tile, (in_block ? slots.blocks : slots.copies)[tile].part(0, bytes), to);
    }
  }
  if (layout.frozen.shard > 0) {
    const Piece from{slots_.of(unit).frozen, 0, layout.frozen.shard * width(unit)};
    upload(none, from, own_shard(unit, layout.frozen));
  }
}

// A record can be read as soon as it is written; that it is committed nobody has to wait for.
void Compiler::fetch(const TileName& name, Phase phase, const Piece& to) {
  const auto written = written_.find(name);
  builder_.add(
      {.kind = OpKind::read_first, .lane = Lane::fetch, .phase = phase, .unit = name.unit, .tile = name.tile, .to = to},
      written == written_.end() ? std::vector<std::size_t>{} : std::vector{written->second});
}

namespace {

void check(const CompileInput& input) {
  check(input.model);
  check(input.placement);
  const auto refuse = [](std::string what, std::string needed) {
    fail(Code::bad_argument, {.what = std::move(what), .needed = std::move(needed)});
  };
  if (input.model.units.size() != input.layout.units.size() || input.layout.shards != input.placement.shards) {
    refuse(fmt::format("a model of {} units on {} shards came with a layout of {} on {}", input.model.units.size(),
                       input.placement.shards, input.layout.units.size(), input.layout.shards),
           "the layout that make_layout() gives for this model and placement");
  }
  if (input.rank_in_shard_group >= input.placement.shards) {
    refuse(fmt::format("a program for rank {} was asked for", input.rank_in_shard_group),
           fmt::format("a rank below {}", input.placement.shards));
  }
  if (input.micro_steps == 0) refuse("a step of no micro-steps was asked for", "at least one");
  if (input.schedule.staging_slots == 0) refuse("records were to pass through no slots", "at least one");
  if (input.schedule.update_in_backward && input.micro_steps > 1) {
    refuse(fmt::format("updates were asked for in the backward pass of {} micro-steps", input.micro_steps),
           "one micro-step, or updates after the backward pass");
  }
}

}  // namespace

Trace trace_of(const CompileInput& input) { return input.trace.empty() ? declared_order(input.model) : input.trace; }

Program compile(const CompileInput& input) {
  check(input);
  const Trace trace = trace_of(input);
  return Compiler(input, trace).run();
}

Program outline(const CompileInput& input) {
  check(input);
  const Trace trace = trace_of(input);
  return Compiler(input, trace).outline();
}

}  // namespace ballast

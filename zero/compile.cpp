#include "zero/compile.h"

#include <fmt/format.h>

#include "kernels/runtime/error.h"
#include "zero/builder.h"

namespace ballast {
namespace {

class Compiler {
 public:
  explicit Compiler(const CompileInput& input) : in_(input), units_(input.model.units.size()) { make_slots(); }

  Program run() && {
    for (std::size_t unit = 0; unit < units_; ++unit) {
      builder_.add({.kind = OpKind::clear, .unit = unit, .to = builder_.whole(reduced_[unit])});
    }
    for (std::size_t micro = 0; micro < in_.micro_steps; ++micro) {
      for (std::size_t unit = 0; unit < units_; ++unit) {
        use(unit, Phase::forward);
      }
      for (std::size_t unit = units_; unit-- > 0;) {
        use(unit, Phase::backward);
      }
    }
    std::vector<std::size_t> norms;
    for (std::size_t unit = 0; unit < units_; ++unit) {
      norms.push_back(builder_.add({.kind = OpKind::norm, .unit = unit, .from = builder_.whole(reduced_[unit])}));
    }
    agreed_ = builder_.add({.kind = OpKind::agree, .after = norms});
    for (std::size_t unit = 0; unit < units_; ++unit) {
      update(unit);
    }
    builder_.add({.kind = OpKind::commit, .after = std::move(writes_)});
    Program program = std::move(builder_).finish();
    program.micro_steps = in_.micro_steps;
    return program;
  }

 private:
  // One slot for each unit, or a few that the units take turns with.
  std::vector<std::size_t> slots(std::string_view what, bool one_each, DType dtype, std::size_t UnitLayout::*elements) {
    std::vector<std::size_t> result;
    const std::size_t turns = one_each ? units_ : std::min(units_, in_.placement.gathered_units);
    std::size_t largest = 0;
    for (const UnitLayout& unit : in_.layout.units) {
      largest = std::max(largest, unit.*elements);
    }
    for (std::size_t i = 0; i < turns; ++i) {
      const std::size_t count = one_each ? in_.layout.units[i].*elements : largest;
      result.push_back(builder_.slot({fmt::format("{}.{}", what, i), dtype, count}));
    }
    for (std::size_t i = turns; i < units_; ++i) {
      result.push_back(result[i - turns]);
    }
    return result;
  }

  void make_slots() {
    const Placement& placement = in_.placement;
    const DType dtype = in_.model.units.front().dtype;
    whole_ = slots("parameters", placement.whole_parameters, dtype, &UnitLayout::elements);
    if (!placement.whole_parameters) shard_ = slots("shard", true, dtype, &UnitLayout::shard);
    gradients_ = slots("gradients", placement.whole_gradients, dtype, &UnitLayout::elements);
    reduced_ = slots("reduced", true, DType::fp32, &UnitLayout::shard);
    make_state_slots();
  }

  // State on a drive passes through one slot, tile by tile.
  void make_state_slots() {
    const bool on_drive = in_.placement.state == Tier::nvme;
    const std::size_t shared = on_drive ? builder_.slot({"state", DType::u8, in_.state_bytes_per_tile}) : none;
    for (std::size_t unit = 0; unit < units_; ++unit) {
      state_.emplace_back();
      for (std::size_t tile = 0; tile < in_.layout.units[unit].tiles.size(); ++tile) {
        const auto own = [&] {
          return Slot{fmt::format("state.{}.{}", unit, tile), DType::u8, in_.state_bytes_per_tile};
        };
        state_[unit].push_back(on_drive ? shared : builder_.slot(own()));
      }
    }
  }

  Piece whole_parameters(std::size_t unit) const { return {whole_[unit], 0, in_.layout.units[unit].elements}; }

  // This rank's part of a unit's parameters, wherever they are kept.
  Piece own_parameters(std::size_t unit) const {
    const std::size_t count = in_.layout.units[unit].shard;
    return shard_.empty() ? Piece{whole_[unit], in_.rank_in_shard_group * count, count} : Piece{shard_[unit], 0, count};
  }

  void gather(std::size_t unit, Phase phase) {
    if (in_.layout.shards > 1) {
      builder_.add({.kind = OpKind::gather,
                    .phase = phase,
                    .unit = unit,
                    .from = own_parameters(unit),
                    .to = whole_parameters(unit)});
    }
  }

  void use(std::size_t unit, Phase phase) {
    const bool backward = phase == Phase::backward;
    const Piece gradients{gradients_[unit], 0, in_.layout.units[unit].elements};
    if (!in_.placement.whole_parameters) gather(unit, phase);
    if (backward) builder_.add({.kind = OpKind::clear, .phase = phase, .unit = unit, .to = gradients});
    builder_.add({.kind = OpKind::use,
                  .phase = phase,
                  .unit = unit,
                  .from = whole_parameters(unit),
                  .to = backward ? gradients : Piece{}});
    if (!in_.placement.whole_parameters) {
      builder_.add({.kind = OpKind::release, .phase = phase, .unit = unit, .to = whole_parameters(unit)});
    }
    if (backward) {
      builder_.add({.kind = OpKind::reduce,
                    .phase = phase,
                    .unit = unit,
                    .ranks = in_.layout.shards > 1 ? Ranks::shard_group : Ranks::replica_group,
                    .from = gradients,
                    .to = builder_.whole(reduced_[unit])});
    }
  }

  void update(std::size_t unit) {
    const std::vector<Range>& tiles = in_.layout.units[unit].tiles;
    const bool on_drive = in_.placement.state == Tier::nvme;
    for (std::size_t tile = 0; tile < tiles.size(); ++tile) {
      const Piece state = builder_.whole(state_[unit][tile]);
      const auto [first, count] = tiles[tile];
      const Piece own = own_parameters(unit);
      if (on_drive) builder_.add({.kind = OpKind::read, .unit = unit, .tile = tile, .to = state});
      builder_.add({.kind = OpKind::update,
                    .unit = unit,
                    .tile = tile,
                    .from = {reduced_[unit], first, count},
                    .to = {own.slot, own.first + first, count},
                    .state = state,
                    .after = {agreed_}});
      if (on_drive) {
        writes_.push_back(builder_.add({.kind = OpKind::write, .unit = unit, .tile = tile, .from = state}));
      }
    }
    if (in_.placement.whole_parameters) gather(unit, Phase::step);
  }

  const CompileInput& in_;
  std::size_t units_;
  Builder builder_;
  std::vector<std::size_t> whole_, shard_, gradients_, reduced_;  // slot by unit
  std::vector<std::vector<std::size_t>> state_;                   // slot by unit and tile
  std::size_t agreed_ = none;
  std::vector<std::size_t> writes_;
};

void check(const CompileInput& input) {
  const std::vector<Unit>& units = input.model.units;
  const auto refuse = [](std::string what, std::string needed) {
    fail(Code::bad_argument, {.what = std::move(what), .needed = std::move(needed)});
  };
  if (units.empty()) {
    refuse("a model without units was to be trained", "at least one unit");
  }
  if (units.size() != input.layout.units.size()) {
    refuse(fmt::format("a model of {} units came with a layout of {}", units.size(), input.layout.units.size()),
           "the layout that make_layout() gives for this model");
  }
  for (const Unit& unit : units) {
    if (unit.dtype != units.front().dtype) {
      refuse(fmt::format("unit {} is in {}, unit {} in {}", units.front().name, name(units.front().dtype), unit.name,
                         name(unit.dtype)),
             "one number format for all units");
    }
  }
  if (input.placement.gathered_units == 0 || input.micro_steps == 0) {
    refuse(fmt::format("{} gathered units and {} micro-steps were asked for", input.placement.gathered_units,
                       input.micro_steps),
           "at least one of each");
  }
}

}  // namespace

Program compile(const CompileInput& input) {
  check(input);
  return Compiler(input).run();
}

}  // namespace ballast

#include "zero/engine/corruption_check.h"

#include <fmt/format.h>

#include <algorithm>

namespace ballast {
namespace {

// Returns a backend with the usable instruction set that differs most from the engine's.
std::unique_ptr<kernels::Backend> other_backend() {
  return kernels::cpu_backend({.threads = 1, .isa = kernels::simd::usable_isas().back()});
}

std::vector<std::byte> bytes_of(const std::byte* from, std::size_t count, const ExecContext& context) {
  std::vector<std::byte> bytes(count);
  if (count > 0) context.copy(bytes.data(), from, count);
  return bytes;
}

// With an fp32 master, an update only writes the parameter.
bool is_read(const TileMemory& tile) { return tile.parameter_dtype == DType::fp32 || tile.format != StateFormat::fp32; }

}  // namespace

CorruptionCheck::CorruptionCheck(const CompiledPlan& plan, std::size_t every, std::size_t rank)
    : plan_(plan), every_(every), rank_(rank), backend_(other_backend()) {
  for (std::size_t unit = 0; unit < plan.layout().units.size(); ++unit) {
    for (std::size_t tile = 0; tile < plan.layout().units[unit].tiles.size(); ++tile) {
      tiles_.emplace_back(unit, tile);
    }
  }
}

bool CorruptionCheck::is_next(const Tile& tile, std::uint64_t step) const {
  return step % every_ == 0 && tiles_[(step / every_) % tiles_.size()] == tile;
}

CorruptionCheck::Copy CorruptionCheck::copy_of(const Op& op, const Arithmetic& arithmetic) const {
  const TileMemory tile = arithmetic.tile_of(op, {});
  const ExecContext& context = arithmetic.context();
  Copy copy{.parameter = bytes_of(tile.parameter, tile.count * byte_size(tile.parameter_dtype), context),
            .state = bytes_of(arithmetic.state_of(op), op.state.bytes, context)};
  context.finish();
  return copy;
}

CorruptionCheck::Copy CorruptionCheck::updated(Copy copy, const Op& op, const StepNumbers& step,
                                               const Arithmetic& arithmetic) const {
  const TileMemory original = arithmetic.tile_of(op, step);
  const std::vector<std::byte> gradient =
      bytes_of(original.gradient, original.count * byte_size(original.gradient_dtype), arithmetic.context());
  arithmetic.context().finish();
  TileMemory tile = plan_.blocks().state(op.unit).tile(copy.state.data());
  tile.parameter = copy.parameter.data();
  tile.gradient = gradient.data();
  tile.gradient_dtype = original.gradient_dtype;
  tile.count = original.count;
  tile.first_index = original.first_index;
  tile.rounding_stream = original.rounding_stream;
  backend_->update(tile, arithmetic.runs_of(op), step.groups);
  return copy;
}

// Returns an empty string if there is none.
std::string CorruptionCheck::first_difference(const Copy& expected, const Copy& found, std::size_t unit) const {
  const auto at = [](const std::vector<std::byte>& one, const std::vector<std::byte>& other) {
    return static_cast<std::size_t>(std::ranges::mismatch(one, other).in1 - one.begin());
  };
  if (const std::size_t byte = at(expected.parameter, found.parameter); byte < expected.parameter.size()) {
    return fmt::format("the parameter, element {}", byte / byte_size(plan_.model().units[unit].dtype));
  }
  const std::size_t byte = at(expected.state, found.state);
  for (const optim::StatePart& part : plan_.blocks().state(unit).parts()) {
    if (byte >= part.offset && byte < part.offset + part.bytes) {
      return fmt::format("the {}, byte {}", part.name, byte - part.offset);
    }
  }
  return byte < expected.state.size() ? "the padding between the parts of the state" : "";
}

void CorruptionCheck::require_same(const Copy& expected, const Copy& found, const Op& op, std::uint64_t step,
                                   const char* what) const {
  const std::string difference = first_difference(expected, found, op.unit);
  require(difference.empty(), Code::wrong_bits, [&] {
    const Unit& unit = plan_.model().units[op.unit];
    const UnitLayout& layout = plan_.layout().units[op.unit];
    std::vector<std::string_view> names;
    for (const TensorPart& part :
         tensors_in(unit, layout, layout.trained, plan_.input().rank_in_shard_group, layout.tiles[op.tile])) {
      names.push_back(unit.tensors[part.tensor].name);
    }
    return Problem{.what = fmt::format("{}, first in {} of the tile", what, difference),
                   .where = fmt::format("step {}, rank {}, tile {}, which holds parts of {}", step, rank_, op.tile,
                                        fmt::join(names, ", "))};
  });
}

void CorruptionCheck::update(const Op& op, const StepNumbers& step, const Arithmetic& arithmetic) {
  const Tile tile{op.unit, op.tile};
  std::map<Tile, Copy>::node_type left;
  {
    const std::lock_guard lock(mutex_);
    left = left_.extract(tile);
  }
  if (left.empty() && !is_next(tile, step.number)) return arithmetic.update(op, step);
  Copy before = copy_of(op, arithmetic);
  if (!left.empty()) {
    if (!is_read(arithmetic.tile_of(op, step))) before.parameter = left.mapped().parameter;
    require_same(left.mapped(), before, op, step.number, "an update found other bits than the last one left");
  }
  const Copy expected = updated(std::move(before), op, step, arithmetic);
  arithmetic.update(op, step);
  Copy after = copy_of(op, arithmetic);
  require_same(expected, after, op, step.number, "an update that was made twice gave other bits the second time");
  const std::lock_guard lock(mutex_);
  ++checked_;
  if (is_next(tile, step.number)) left_.insert_or_assign(tile, std::move(after));
}

void CorruptionCheck::forget() {
  const std::lock_guard lock(mutex_);
  left_.clear();
}

std::size_t CorruptionCheck::tiles() const {
  const std::lock_guard lock(mutex_);
  return checked_;
}

}  // namespace ballast

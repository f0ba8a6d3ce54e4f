// The operations of one lane that compute or copy, applied to memory.
#pragma once

#include <ballast/step.h>

#include <algorithm>
#include <array>
#include <optional>

#include "kernels/backend.h"
#include "kernels/random_math.h"
#include "kernels/state_access.h"
#include "zero/engine/exec_context.h"
#include "zero/engine/lanes.h"
#include "zero/engine/slots.h"
#include "zero/engine/step_run.h"
#include "zero/plan/compile.h"

namespace ballast {

// Called by its lane's thread and, between steps, when nothing is under way, by the trainer's. On a GPU all work is
// issued into the lane's stream; functions that return a value wait for it.
class Arithmetic {
 public:
  Arithmetic(const CompiledPlan& plan, const Slots& slots, const ExecContext& context)
      : plan_(plan), slots_(slots), context_(context) {}

  const ExecContext& context() const { return context_; }

  // An operation without a unit clears the sum of a norm.
  void clear(const Op& op) const {
    if (op.unit == none) return context_.zero(slots_.data(op.to), op.to.bytes);
    context_.backend().clear(slots_.view(op.to, dtype(op)));
  }

  void copy(const Op& op) const { context_.copy(slots_.data(op.to), slots_.data(op.from), op.to.bytes); }

  // Rounding to nearest again and again would drop gradients that are small next to the sum.
  void accumulate(const Op& op, std::uint64_t step) const {
    const View from = op.value_bytes > 0 ? slots_.view(op.from, dtype(op)) : sums(op, op.from);
    const View into = sums(op, op.to);
    if (into.dtype() == DType::fp32) return context_.backend().accumulate(from, into, norm_in(op));
    const UnitLayout& layout = plan_.layout().units[op.unit];
    const std::size_t shard = layout.trained.shard_range(plan_.input().rank_in_shard_group).first;
    const Range range{shard + op.first, into.count()};
    const std::uint64_t stream = kernels::rounding_stream(kernels::seed_of_gradients, op.sum, step);
    context_.backend().accumulate_stochastic(from, into, runs_in(plan_.model().units[op.unit], layout, range),
                                             {.stream = stream, .first_index = range.first}, norm_in(op));
  }

  // A lone rank's reduction adds its gradients to zero, so that its bits are those of a sum.
  void reduce_alone(const Op& op) const {
    const ConstView from = slots_.view(op.from, dtype(op));
    context_.backend().sum({&from, 1}, sums(op, op.to), norm_in(op));
  }

  void add_squares(const Op& op) const {
    const View gradients = sums(op, op.from);
    auto* const sum = reinterpret_cast<kernels::ExactSum*>(slots_.data(op.to));
    for (const Range& part :
         counted_in(plan_.model().units[op.unit], plan_.layout().units[op.unit], plan_.input().rank_in_shard_group)) {
      const Range common = intersection(part, {op.first, gradients.count()});
      if (common.count > 0)
        context_.backend().sum_of_squares(gradients.part(common.first - op.first, common.count), sum);
    }
  }

  kernels::ExactSum read_sum(const Piece& squares) const {
    kernels::ExactSum sum;
    context_.copy(reinterpret_cast<std::byte*>(&sum), slots_.data(squares), sizeof sum);
    context_.finish();
    return sum;
  }

  kernels::ExactSum take_sum(const Piece& squares) const {  // reads it and leaves zero
    const kernels::ExactSum sum = read_sum(squares);
    context_.zero(slots_.data(squares), sizeof sum);
    return sum;
  }

  void update(const Op& op, const StepNumbers& step) const {
    std::vector<kernels::TileUpdate> tiles;
    for (const Op& each : by_tile(op)) {
      tiles.push_back(
          {tile_of(each, step), plan_.input().needs_matrices() ? matrix_runs_of(each, step) : runs_of(each, step)});
    }
    context_.backend().update_all(tiles, plan_.input().needs_matrices() ? step.matrices : step.groups);
  }

  // The direction takes the place of the parameter, which stays as it is.
  void make_direction(const Op& op, const StepNumbers& step) const {  // the first part of a rule of whole matrices
    std::vector<kernels::TileUpdate> tiles;
    for (const Op& each : by_tile(op)) {
      TileMemory tile = tile_of(each, step);
      tile.gradient_dtype = plan_.input().dtype_of_sums(op.unit);
      tile.parameter_dtype = DType::bf16;
      tile.master = nullptr;
      tiles.push_back({tile, runs_of(each, step)});
    }
    context_.backend().update_all(tiles, step.groups);
  }

  // An update of several tiles, as one of each.
  std::vector<Op> by_tile(const Op& update) const {
    std::vector<Op> each;
    for (std::size_t i = 0; i < update.tiles; ++i)
      each.push_back(part_on_tile(plan_.input(), update, update.tile + i));
    return each;
  }

  // The memory and the rules of an update of one tile.
  TileMemory tile_of(const Op& op, const StepNumbers& step) const {
    const Range range = range_of(op);
    TileMemory tile = plan_.blocks().state(op.unit, op.tile).tile(slots_.data(op.state));
    tile.parameter = slots_.data(op.to);
    tile.gradient = slots_.data(op.from);
    tile.gradient_dtype = plan_.input().needs_matrices() ? DType::bf16 : plan_.input().dtype_of_sums(op.unit);
    tile.count = range.count;
    tile.first_index = range.first;
    tile.rounding_stream = kernels::rounding_stream(kernels::seed_of_state, 0, step.number);
    return tile;
  }

  std::vector<kernels::Run> runs_of(const Op& update, const StepNumbers& step) const {
    return runs_in(plan_.model().units[update.unit], plan_.layout().units[update.unit], range_of(update),
                   step.groups_of(update.unit));
  }

  std::vector<kernels::Run> matrix_runs_of(const Op& update, const StepNumbers& step) const {
    return plan_.matrix_groups().runs_in(plan_.model().units[update.unit], plan_.layout().units[update.unit],
                                         range_of(update), step.groups_of(update.unit));
  }

  const std::byte* state_of(const Op& update) const { return slots_.data(update.state); }

  // The first element of a norm operation's gradients that is not finite; kernels::no_index if all are. Works in the
  // memory of the operation's sum, which must have been taken, and leaves it zero.
  std::uint64_t first_non_finite(const Op& norm) const {
    std::uint64_t first = kernels::no_index;
    std::byte* const found = slots_.data(norm.to);
    context_.copy(found, reinterpret_cast<const std::byte*>(&first), sizeof first);
    context_.backend().first_non_finite(sums(norm, norm.from), 0, reinterpret_cast<std::uint64_t*>(found));
    context_.copy(reinterpret_cast<std::byte*>(&first), found, sizeof first);
    context_.finish();
    context_.zero(found, sizeof first);
    return first;
  }

  // Sums over parts of norm operations' gradients. They are computed in the memory of the operations' sum, one after the
  // other, so that memory is saved before and restored afterwards. `host` must stay until context().finish(); the calls
  // do not wait for a GPU if it is pinned.
  void save_sum(const Piece& squares, kernels::ExactSum* host) const {
    context_.copy(reinterpret_cast<std::byte*>(host), slots_.data(squares), sizeof *host);
  }

  void squares_of(const Op& norm, const Range& part, kernels::ExactSum* host) const {
    std::byte* const sum = slots_.data(norm.to);
    context_.zero(sum, sizeof *host);
    const View values = sums(norm, norm.from).part(part.first, part.count);
    context_.backend().sum_of_squares(values, reinterpret_cast<kernels::ExactSum*>(sum));
    save_sum(norm.to, host);
  }

  void restore_sum(const Piece& squares, const kernels::ExactSum* host) const {
    context_.copy(slots_.data(squares), reinterpret_cast<const std::byte*>(host), sizeof *host);
  }

  // Makes a tile's state initial, in memory that is zero. Only a master that holds the parameter's bits is not zero.
  void begin_state(const TileMemory& tile) const {
    if (tile.format == StateFormat::fp32) kernels::begin_master(tile, context_.backend());
  }

 private:
  Range range_of(const Op& update) const {  // a range of the unit's elements
    return plan_.layout().units[update.unit].tile_range(plan_.input().rank_in_shard_group, update.tile);
  }

  // The norm that a sum takes in its pass, if it takes one.
  kernels::ExactSum* norm_in(const Op& sum) const {
    return takes_norm(sum) ? reinterpret_cast<kernels::ExactSum*>(slots_.data(sum.state)) : nullptr;
  }

  DType dtype(const Op& op) const { return plan_.model().units[op.unit].dtype; }

  View sums(const Op& op, const Piece& piece) const {  // sums of the gradients of its unit
    return slots_.view(piece, plan_.input().dtype_of_sums(op.unit));
  }

  const CompiledPlan& plan_;
  const Slots& slots_;
  ExecContext context_;
};

// The arithmetic of each lane: the same operations, in the lane's own stream or on the host.
class LaneArithmetic {
 public:
  // All arguments outlive this. Without a GPU every lane works on the host, with `cpu`.
  LaneArithmetic(const CompiledPlan& plan, const Slots& slots, kernels::Backend& cpu, const GpuLanes* gpu) {
    for (std::size_t i = 0; i < lane_count; ++i) {
      const Lane lane = static_cast<Lane>(i);
      const bool on_gpu = gpu != nullptr && works_on_device(lane);
      lanes_[i].emplace(plan, slots, on_gpu ? ExecContext(gpu->backend(lane), gpu->stream(lane)) : ExecContext(cpu));
    }
  }

  LaneArithmetic(LaneArithmetic&&) = delete;

  const Arithmetic& of(Lane lane) const { return *lanes_[static_cast<std::size_t>(lane)]; }

  // Copies and clears memory of the device tier between steps.
  const ExecContext& copies() const { return of(Lane::upload).context(); }

 private:
  std::array<std::optional<Arithmetic>, lane_count> lanes_;
};

}  // namespace ballast

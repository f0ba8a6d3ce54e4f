#include "zero/engine/arithmetic.h"

#include <algorithm>

#include "kernels/random_math.h"

namespace ballast {

// An operation without a unit clears the sum of a norm.
void Arithmetic::clear(const Op& op) const {
  if (op.unit == none) return context_.zero(slots_.data(op.to), op.to.bytes);
  context_.backend().clear(slots_.view(op.to, dtype(op)));
}

void Arithmetic::copy(const Op& op) const { context_.copy(slots_.data(op.to), slots_.data(op.from), op.to.bytes); }

View Arithmetic::sums(const Op& op, const Piece& piece) const {
  return slots_.view(piece, plan_.input().dtype_of_sums(op.unit));
}

// Rounding to nearest again and again would drop gradients that are small next to the sum.
void Arithmetic::accumulate(const Op& op, std::uint64_t step) const {
  const View from = sums(op, op.from);
  const View into = sums(op, op.to);
  if (into.dtype() == DType::fp32) return context_.backend().accumulate(from, into);
  const UnitLayout& layout = plan_.layout().units[op.unit];
  const Range shard = layout.trained.shard_range(plan_.input().rank_in_shard_group);
  const std::uint64_t stream = kernels::rounding_stream(kernels::seed_of_gradients, op.sum, step);
  context_.backend().accumulate_stochastic(from, into, runs_in(plan_.model().units[op.unit], layout, shard),
                                           {.stream = stream, .first_index = shard.first});
}

void Arithmetic::add_squares(const Op& op) const {
  const View gradients = sums(op, op.from);
  auto* const sum = reinterpret_cast<kernels::ExactSum*>(slots_.data(op.to));
  for (const Range& part :
       counted_in(plan_.model().units[op.unit], plan_.layout().units[op.unit], plan_.input().rank_in_shard_group)) {
    context_.backend().sum_of_squares(gradients.part(part.first, part.count), sum);
  }
}

Range Arithmetic::range_of(const Op& update) const {
  return plan_.layout().units[update.unit].tile_range(plan_.input().rank_in_shard_group, update.tile);
}

TileMemory Arithmetic::tile_of(const Op& op, const StepNumbers& step) const {
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

std::vector<kernels::Run> Arithmetic::runs_of(const Op& update, const StepNumbers& step) const {
  return runs_in(plan_.model().units[update.unit], plan_.layout().units[update.unit], range_of(update),
                 step.groups_of(update.unit));
}

void Arithmetic::update(const Op& op, const StepNumbers& step) const {
  if (!plan_.input().needs_matrices()) {
    return context_.backend().update(tile_of(op, step), runs_of(op, step), step.groups);
  }
  const auto runs = plan_.matrix_groups().runs_in(plan_.model().units[op.unit], plan_.layout().units[op.unit],
                                                  range_of(op), step.groups_of(op.unit));
  context_.backend().update(tile_of(op, step), runs, step.matrices);
}

// The direction takes the place of the parameter, which stays as it is.
void Arithmetic::make_direction(const Op& op, const StepNumbers& step) const {
  TileMemory tile = tile_of(op, step);
  tile.gradient_dtype = plan_.input().dtype_of_sums(op.unit);
  tile.parameter_dtype = DType::bf16;
  tile.master = nullptr;
  context_.backend().update(tile, runs_of(op, step), step.groups);
}

kernels::ExactSum Arithmetic::read_sum(const Piece& squares) const {
  kernels::ExactSum sum;
  context_.copy(reinterpret_cast<std::byte*>(&sum), slots_.data(squares), sizeof sum);
  context_.finish();
  return sum;
}

kernels::ExactSum Arithmetic::take_sum(const Piece& squares) const {
  const kernels::ExactSum sum = read_sum(squares);
  context_.zero(slots_.data(squares), sizeof sum);
  return sum;
}

std::uint64_t Arithmetic::first_non_finite(const Op& norm) const {
  std::uint64_t first = kernels::no_index;
  std::byte* const found = slots_.data(norm.to);
  context_.copy(found, reinterpret_cast<const std::byte*>(&first), sizeof first);
  context_.backend().first_non_finite(sums(norm, norm.from), 0, reinterpret_cast<std::uint64_t*>(found));
  context_.copy(reinterpret_cast<std::byte*>(&first), found, sizeof first);
  context_.finish();
  context_.zero(found, sizeof first);
  return first;
}

void Arithmetic::save_sum(const Piece& squares, kernels::ExactSum* host) const {
  context_.copy(reinterpret_cast<std::byte*>(host), slots_.data(squares), sizeof *host);
}

void Arithmetic::squares_of(const Op& norm, const Range& part, kernels::ExactSum* host) const {
  std::byte* const sum = slots_.data(norm.to);
  context_.zero(sum, sizeof *host);
  const View values = sums(norm, norm.from).part(part.first, part.count);
  context_.backend().sum_of_squares(values, reinterpret_cast<kernels::ExactSum*>(sum));
  save_sum(norm.to, host);
}

void Arithmetic::restore_sum(const Piece& squares, const kernels::ExactSum* host) const {
  context_.copy(slots_.data(squares), reinterpret_cast<const std::byte*>(host), sizeof *host);
}

LaneArithmetic::LaneArithmetic(const CompiledPlan& plan, const Slots& slots, kernels::Backend& cpu,
                               const GpuLanes* gpu) {
  for (std::size_t i = 0; i < lane_count; ++i) {
    const Lane lane = static_cast<Lane>(i);
    const bool on_gpu = gpu != nullptr && works_on_device(lane);
    lanes_[i].emplace(plan, slots, on_gpu ? ExecContext(gpu->backend(lane), gpu->stream(lane)) : ExecContext(cpu));
  }
}

}  // namespace ballast

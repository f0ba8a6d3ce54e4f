#include "zero/arithmetic.h"

#include <algorithm>
#include <cstring>

#include "kernels/random_math.h"

namespace ballast {

void Arithmetic::clear(const Op& op) const { backend_.fill(slots_.view(op.to, dtype(op)), 0.0f); }

void Arithmetic::copy(const Op& op) const { std::memcpy(slots_.data(op.to), slots_.data(op.from), op.to.bytes); }

void Arithmetic::accumulate(const Op& op) const {
  backend_.accumulate(slots_.view(op.from, DType::fp32), 1.0f, slots_.view(op.to, DType::fp32));
}

void Arithmetic::add_squares(const Op& op) const {
  backend_.sum_of_squares(slots_.view(op.from, DType::fp32), reinterpret_cast<kernels::ExactSum*>(slots_.data(op.to)));
}

void Arithmetic::update(const Op& op, const StepNumbers& step) const {
  const UnitLayout& layout = plan_.layout().units[op.unit];
  const auto [first, count] = layout.tiles[op.tile];
  const Range range{layout.trained.of_rank(plan_.input().rank_in_shard_group).first + first, count};
  kernels::UpdateTile tile = plan_.blocks().state(op.unit).tile(slots_.data(op.state));
  tile.parameter = slots_.data(op.to);
  tile.gradient = slots_.data(op.from);
  tile.gradient_dtype = DType::fp32;
  tile.count = count;
  tile.first_index = range.first;
  tile.rounding_stream = kernels::rounding_stream(0, op.unit, step.number);
  backend_.update(tile, runs_in(plan_.model().units[op.unit], layout, range), step.groups);
}

std::uint64_t Arithmetic::first_non_finite(const Op& op) const {
  std::uint64_t first = kernels::no_index;
  backend_.first_non_finite(slots_.view(op.from, DType::fp32), 0, &first);
  return first;
}

void Arithmetic::begin_state(std::size_t unit, std::size_t count, const View& parameters,
                             std::span<std::byte> state) const {
  std::ranges::fill(state, std::byte{0});
  const kernels::UpdateTile tile = plan_.blocks().state(unit).tile(state.data());
  if (tile.format == kernels::StateFormat::fp32 && tile.master != nullptr) {
    backend_.cast(parameters, View(tile.master, count, DType::fp32));
  }
}

}  // namespace ballast

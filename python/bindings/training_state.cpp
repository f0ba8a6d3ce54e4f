// Moments tensor by tensor: a tile holds parts of several.
#include "kernels/state_access.h"
#include "python/bindings/training.h"

namespace ballast::python {
namespace {

std::size_t rank_in_shard_group(const Training& training) { return training.plan().input().rank_in_shard_group; }

// The tensors' parts in a tile, and where those begin in it.
template <class Visit>
void each_part(const Training& training, const OwnTile& tile, Visit&& visit) {
  const UnitLayout& layout = training.plan().layout().units[tile.unit];
  const std::size_t rank = rank_in_shard_group(training);
  const std::size_t first = tile.range.first - layout.trained.of_rank(rank).first;
  for (const TensorPart& part :
       tensors_in(training.model().units[tile.unit], layout, layout.trained, rank, {first, tile.range.count})) {
    visit(part.tensor, part.range, part.in_shard - first);
  }
}

}  // namespace

Parts parts_of(Training& training, std::size_t unit, std::size_t tensor) {
  const Unit& model = training.model().units[unit];
  Parts parts;
  for (const TensorPart& part :
       owners_of(model, training.plan().layout().units[unit], tensor, {0, model.tensors[tensor].elements()})) {
    if (part.rank == rank_in_shard_group(training)) parts.emplace_back(part.range.first, part.range.count);
  }
  return parts;
}

void read_moment(Training& training, const MomentPlace& place, float* into) {
  std::vector<float> numbers;
  training.engine().look_at_state([&](const OwnTile& tile) {
    if (tile.unit != place.unit) return;
    numbers.resize(tile.memory.count);
    kernels::read_moment(tile.memory, place.moment, numbers);
    each_part(training, tile, [&](std::size_t tensor, const Range& range, std::size_t in_tile) {
      if (tensor == place.tensor) std::copy_n(numbers.data() + in_tile, range.count, into + range.first);
    });
  });
}

void write_moments(Training& training, const MomentAddress& address) {
  std::vector<float> numbers;
  training.engine().change_state([&](const OwnTile& tile) {
    for (const kernels::Moment moment : {kernels::Moment::momentum, kernels::Moment::variance}) {
      if ((moment == kernels::Moment::momentum ? tile.memory.momentum : tile.memory.variance) == nullptr) continue;
      numbers.resize(tile.memory.count);
      kernels::read_moment(tile.memory, moment, numbers);
      each_part(training, tile, [&](std::size_t tensor, const Range& range, std::size_t in_tile) {
        const std::uintptr_t from = address({tile.unit, tensor, moment});
        if (from == 0) return;
        std::copy_n(reinterpret_cast<const float*>(from) + range.first, range.count, numbers.data() + in_tile);
      });
      kernels::write_moment(tile.memory, moment, numbers);
    }
  });
}

// Device memory is not read here: a GPU's whole parameters are copied to the host with their tile.
void take_whole_parameters(Training& training) {
  const auto backend = kernels::cpu_backend({.threads = 1});
  training.engine().change_state([&](const OwnTile& tile) {
    const View whole = training.engine().whole_parameters(tile.unit);
    const View part = whole.part(tile.range.first, tile.range.count);
    if (part.data() != tile.memory.parameter) std::memcpy(tile.memory.parameter, part.data(), part.bytes());
    kernels::begin_master(tile.memory, *backend);
  });
}

}  // namespace ballast::python

// The arithmetic of the same step on as much memory, called one after the other: what the engine could at best take.
#pragma once

#include <vector>

#include "benchmarks/engine/model.h"
#include "benchmarks/harness/buffer.h"
#include "kernels/backend.h"

namespace ballast::benchmarks {

class DirectStep {
 public:
  DirectStep(const Shape& shape, std::size_t elements, int threads);

  // Of each unit, the last one first: gradients cleared, brought to fp32, and their squares added. Then one update for
  // each tile.
  void take();

 private:
  struct UnitMemory {
    Buffer parameters;
    Buffer reduced;  // gradients in fp32
    Buffer state;
    std::vector<kernels::UpdateTile> tiles{};
  };

  void add_unit(const Plan& plan, std::size_t unit);
  void sum(const UnitMemory& unit, const View& gradients, kernels::ExactSum& squares);
  void update(UnitMemory& unit, const kernels::GroupStep& group);

  std::unique_ptr<kernels::Backend> backend_;
  std::vector<UnitMemory> units_;
  std::vector<Buffer> gradients_;  // used in turn
  std::uint64_t steps_ = 0;
};

}  // namespace ballast::benchmarks

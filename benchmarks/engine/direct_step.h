// The arithmetic of the same step on as much memory, without the engine: one kernel after the other, the least possible
// time.
#pragma once

#include <vector>

#include "benchmarks/engine/model.h"
#include "benchmarks/harness/buffer.h"
#include "kernels/backend.h"

namespace ballast::benchmarks {

class DirectStep {
 public:
  DirectStep(const Shape& shape, std::size_t elements, int threads);

  // Clears the gradients of each unit, the last one first, casts them to fp32 and adds their squares. Then updates each
  // tile.
  void take();

 private:
  struct UnitMemory {
    Buffer parameters;
    Buffer reduced;  // gradients in fp32
    Buffer state;
    std::vector<TileMemory> tiles{};
  };

  void add_unit(const CompiledPlan& plan, std::size_t unit);
  void sum(const UnitMemory& unit, const View& gradients, kernels::ExactSum& squares);
  void update(UnitMemory& unit, const kernels::GroupStep& group);

  std::unique_ptr<kernels::Backend> backend_;
  std::vector<UnitMemory> units_;
  std::vector<Buffer> gradients_;  // used in turn
  std::uint64_t steps_ = 0;
};

}  // namespace ballast::benchmarks

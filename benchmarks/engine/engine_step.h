// A step through the engine, by a trainer that does nothing with its leases.
#pragma once

#include <ballast/comm.h>

#include "benchmarks/engine/model.h"
#include "zero/engine/engine.h"

namespace ballast::benchmarks {

class EngineStep {
 public:
  EngineStep(const Shape& shape, std::size_t elements, int threads);

  void take();  // forward, backward and step, until all work is done

 private:
  CompiledPlan plan_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Communicator> world_;
  Mesh mesh_;
  MemoryAccounts accounts_;
  Engine engine_;
};

}  // namespace ballast::benchmarks

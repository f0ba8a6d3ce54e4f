#include "benchmarks/engine/engine_step.h"

#include "zero/comm/thread_communicator.h"

namespace ballast::benchmarks {

EngineStep::EngineStep(const Shape& shape, std::size_t elements, int threads)
    : plan_(plan_of(shape, elements)),
      backend_(kernels::cpu_backend({.threads = threads})),
      world_(lone_communicator(*backend_)),
      mesh_(make_mesh(*world_, plan_.placement())),
      engine_({.plan = plan_, .mesh = mesh_, .backend = *backend_, .accounts = accounts_}) {
  engine_.initialize([&](std::size_t, std::size_t, Range, const View& to) { backend_->fill(to, 1.0f); });
}

void EngineStep::take() {
  const std::size_t units = plan_.model().units.size();
  for (std::size_t unit = 0; unit < units; ++unit) {
    engine_.forward(unit);
  }
  for (std::size_t unit = units; unit-- > 0;) {
    engine_.backward(unit);
  }
  const optim::Rule rule = optim::AdamW{};
  engine_.step({.groups = {&rule, 1}});
  engine_.finish();
}

}  // namespace ballast::benchmarks

// Pulls a thousand numbers towards 1 on one rank, with the optimizer's state in host memory.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "zero/comm/thread_communicator.h"
#include "zero/engine/engine.h"

namespace {

using namespace ballast;

constexpr std::size_t elements = 1000;
constexpr int steps = 50;

Model model() { return {{{.name = "numbers", .dtype = DType::fp32, .tensors = {{"weight", {elements}}}}}}; }

void begin_at_zero(std::size_t, std::size_t, Range, const View& to) { std::ranges::fill(to.as<float>(), 0.0f); }

// The loss is half the sum of the squares of what is missing to 1.
void add_gradients(const Lease& lease) {
  for (std::size_t i = 0; i < elements; ++i) {
    lease.gradient(0).as<float>()[i] += lease.tensor(0).as<float>()[i] - 1.0f;
  }
}

double loss(const Lease& lease) {
  double sum = 0;
  for (std::size_t i = 0; i < elements; ++i) {
    sum += 0.5 * std::pow(lease.tensor(0).as<float>()[i] - 1.0f, 2);
  }
  return sum;
}

}  // namespace

int main() {
  Placement placement;
  placement.state = all_in(Tier::host);
  const Plan plan(model(), {.placement = placement, .names = optim::AdamW::state});

  const auto backend = kernels::cpu_backend();
  const auto world = lone_communicator(*backend);
  Mesh mesh = make_mesh(*world, placement);
  MemoryAccounts accounts;
  Engine engine({.plan = plan, .mesh = mesh, .backend = *backend, .accounts = accounts});
  engine.initialise(begin_at_zero);

  const std::vector<optim::Rule> rules{optim::AdamW{.lr = 0.02, .weight_decay = 0.0}};
  const double first_loss = loss(engine.forward(0));
  for (int step = 0; step < steps; ++step) {
    if (step > 0) engine.forward(0);
    add_gradients(engine.backward(0));
    engine.step({.groups = rules});
  }
  const double last_loss = loss(engine.forward(0));
  engine.finish();

  std::printf("loss %.1f, after %d steps %.1f\n", first_loss, steps, last_loss);
  return last_loss < 0.1 * first_loss ? 0 : 1;
}

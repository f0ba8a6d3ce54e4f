// Pulls a thousand values towards 1 on one rank, with the optimizer state in host memory.
#include <ballast/training.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace {

using namespace ballast;

constexpr std::size_t elements = 1000;
constexpr int steps = 50;

Model model() { return {{{.name = "values", .dtype = DType::fp32, .tensors = {{"weight", {elements}}}}}}; }

void begin_at_zero(std::size_t, std::size_t, Range, const View& to) { std::ranges::fill(to.as<float>(), 0.0f); }

// The loss is half the sum of the squared distances to 1.
void add_gradients(const Lease& lease) {
  for (std::size_t i = 0; i < elements; ++i) {
    lease.gradient(0).as<float>()[i] += lease[0].as<float>()[i] - 1.0f;
  }
}

double loss(const Lease& lease) {
  double sum = 0;
  for (std::size_t i = 0; i < elements; ++i) {
    sum += 0.5 * std::pow(lease[0].as<float>()[i] - 1.0f, 2);
  }
  return sum;
}

}  // namespace

int main() {
  const auto world = single_rank();
  Training training(model(), *world, {optim::AdamW{.lr = 0.02, .weight_decay = 0.0}},
                    {.stage = 0, .state = Tier::host});
  training.start(begin_at_zero);

  const double first_loss = loss(training.forward(0));
  for (int step = 0; step < steps; ++step) {
    if (step > 0) training.forward(0);
    add_gradients(training.backward(0));
    training.step();
  }
  const double last_loss = loss(training.forward(0));
  training.finish();

  std::printf("loss %.1f, after %d steps %.1f\n", first_loss, steps, last_loss);
  return last_loss < 0.1 * first_loss ? 0 : 1;
}

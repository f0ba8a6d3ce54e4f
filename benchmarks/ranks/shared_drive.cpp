// A rank that keeps its state on a drive that other ranks use too: shared_drive DIRECTORY UNITS MILLION_ELEMENTS STEPS. Its
// launcher sets the environment, as torchrun does. It has two trainings, of which one takes turns on the drive, and makes a step of
// each in turn. Rank 0 prints a line for each step: whether ranks took turns, and how long the first and the last rank took to
// update.
#include <ballast/training.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace ballast;

Model model_of(std::size_t units, std::size_t elements) {
  Model model;
  for (std::size_t unit = 0; unit < units; ++unit)
    model.units.push_back({.name = "h." + std::to_string(unit), .tensors = {{"weight", {elements}}}});
  return model;
}

void begin_at_zero(std::size_t, std::size_t, Range, const View& to) { std::ranges::fill(to.as_bytes(), std::byte{}); }

// Returns the seconds of each rank from a common start until its updates are on the drive.
std::vector<double> step(Training& training, Communicator& world) {
  const std::size_t units = training.model().units.size();
  for (std::size_t unit = 0; unit < units; ++unit)
    training.forward(unit);
  for (std::size_t unit = units; unit-- > 0;)
    training.backward(unit);  // gradients of zero
  world.barrier();
  const auto begin = std::chrono::steady_clock::now();
  training.step();
  training.finish();
  std::vector<std::int64_t> took(world.size());
  took[world.rank()] = std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
  world.all_reduce(took);
  std::vector<double> seconds;
  std::ranges::transform(took, std::back_inserter(seconds),
                         [](std::int64_t each) { return 1e-9 * static_cast<double>(each); });
  return seconds;
}

}  // namespace

int main(int count, char** words) {
  try {
    if (count != 5) throw std::runtime_error("use: shared_drive DIRECTORY UNITS MILLION_ELEMENTS STEPS");
    const auto world = connect();
    TrainingOptions options{.stage = 3, .state = Tier::nvme, .threads = 1};
    options.drives.directories = {words[1]};
    std::vector<std::unique_ptr<Training>> trainings;
    for (const auto patience : {std::chrono::milliseconds(0), options.drives.turn_patience}) {
      options.drives.turn_patience = patience;
      const Model model = model_of(std::stoul(words[2]), std::stoul(words[3]) << 20);
      trainings.push_back(std::make_unique<Training>(model, *world, std::vector<optim::Rule>{optim::AdamW{}}, options));
      trainings.back()->initialize(begin_at_zero);
    }
    for (int number = 0; number < std::atoi(words[4]); ++number) {
      const bool takes_turns = number % 2 == 1;
      const std::vector<double> took = step(*trainings[takes_turns ? 1 : 0], *world);
      const auto [first, last] = std::ranges::minmax(took);
      if (world->rank() == 0) std::printf("%d %.6f %.6f\n", static_cast<int>(takes_turns), first, last);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

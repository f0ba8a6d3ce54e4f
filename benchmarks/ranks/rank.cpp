// A rank that computes nothing, of a model of equal units. Its launcher sets the environment, as torchrun does.
//
// rank STEPS [--gloo] [--keep DIRECTORY] trains as little as possible. Rank 0 prints "connected", "started" and "first step". With a
// directory the state is a run there, which "started" has resumed if there is one; and the rank loads the checkpoint that is there
// ("loaded"), and saves one at its end ("saved").
//
// rank STEPS --share DIRECTORY UNITS MILLION_ELEMENTS keeps its state on a drive that other ranks use too. It has two trainings, of
// which one takes turns on the drive, and makes a step of each in turn. Rank 0 prints a line for each step: whether ranks took
// turns, and how long the first and the last rank took to update.
#include <ballast/training.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

namespace {

using namespace ballast;

using Words = std::vector<std::string>;

Model model_of(std::size_t units, std::size_t elements) {
  Model model;
  for (std::size_t unit = 0; unit < units; ++unit)
    model.units.push_back({.name = "h." + std::to_string(unit), .tensors = {{"weight", {elements}}}});
  return model;
}

void begin_at_zero(std::size_t, std::size_t, Range, const View& to) { std::ranges::fill(to.as_bytes(), std::byte{}); }

void use_all(Training& training) {
  const std::size_t units = training.model().units.size();
  for (std::size_t unit = 0; unit < units; ++unit)
    training.forward(unit);
  for (std::size_t unit = units; unit-- > 0;)
    training.backward(unit);  // gradients of zero
}

void say(const Communicator& world, const char* what) {
  if (world.rank() != 0) return;
  std::puts(what);
  std::fflush(stdout);
}

void train(int steps, const Words& options) {
  const bool gloo = std::ranges::count(options, "--gloo") > 0;
  const bool keeps = options.size() > 1 && options[options.size() - 2] == "--keep";
  TrainingOptions how{.stage = 3, .threads = 1};
  if (keeps) {
    how.state = Tier::nvme;
    how.drives = {.directories = {options.back()}, .run = "tiny"};
  }
  const auto world = connect({.transport = gloo ? HostTransport::gloo : HostTransport::fastest});
  say(*world, "connected");
  Training training(model_of(4, 8192), *world, {optim::AdamW{}}, how);
  training.start(begin_at_zero);
  world->barrier();
  say(*world, "started");
  const std::filesystem::path checkpoint = keeps ? std::filesystem::path(options.back()) / "checkpoint" : "";
  if (keeps && training.load(checkpoint)) say(*world, "loaded");
  for (int i = 0; i < steps; ++i) {
    use_all(training);
    training.step();
    if (i == 0) say(*world, "first step");
  }
  training.finish();
  if (keeps) {
    training.save(checkpoint);
    say(*world, "saved");
  }
}

// Returns the seconds of each rank from a common start until its updates are on the drive.
std::vector<double> step_on_drive(Training& training, Communicator& world) {
  use_all(training);
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

void train_on_shared_drive(int steps, const Words& options) {
  const auto world = connect();
  TrainingOptions how{.stage = 3, .state = Tier::nvme, .threads = 1};
  how.drives.directories = {options.at(1)};
  std::vector<std::unique_ptr<Training>> trainings;
  for (const auto patience : {std::chrono::milliseconds(0), how.drives.turn_patience}) {
    how.drives.turn_patience = patience;
    const Model model = model_of(std::stoul(options.at(2)), std::stoul(options.at(3)) << 20);
    trainings.push_back(std::make_unique<Training>(model, *world, std::vector<optim::Rule>{optim::AdamW{}}, how));
    trainings.back()->initialize(begin_at_zero);
  }
  for (int number = 0; number < steps; ++number) {
    const int takes_turns = number % 2;
    const std::vector<double> took = step_on_drive(*trainings[static_cast<std::size_t>(takes_turns)], *world);
    const auto [first, last] = std::ranges::minmax(took);
    if (world->rank() == 0) std::printf("%d %.6f %.6f\n", takes_turns, first, last);
  }
}

}  // namespace

int main(int count, char** words) {
  try {
    const Words options(words + std::min(count, 2), words + count);
    const int steps = count > 1 ? std::atoi(words[1]) : 1;
    const bool shares = !options.empty() && options.front() == "--share";
    if (shares) {
      train_on_shared_drive(steps, options);
    } else {
      train(steps, options);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

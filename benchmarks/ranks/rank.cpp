// A rank that trains as little as possible: rank STEPS [--gloo] [--keep DIRECTORY]. Its launcher sets the environment, as torchrun
// does. Rank 0 prints "connected", "started" and "first step". With a directory the state is a run there, which "started" has resumed
// if there is one; and the rank loads the checkpoint that is there ("loaded"), and saves one at its end ("saved").
#include <ballast/training.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <vector>

namespace {

using namespace ballast;

constexpr std::size_t elements = 8192;

Model model() {
  Model model;
  for (const char* const name : {"h.0", "h.1", "h.2", "h.3"}) {
    model.units.push_back({.name = name, .tensors = {{"weight", {elements}}}});
  }
  return model;
}

void begin_at_zero(std::size_t, std::size_t, Range, const View& to) { std::ranges::fill(to.as_bytes(), std::byte{}); }

void step(Training& training) {
  for (std::size_t unit = 0; unit < training.model().units.size(); ++unit)
    training.forward(unit);
  for (std::size_t unit = training.model().units.size(); unit-- > 0;)
    training.backward(unit);  // gradients of zero
  training.step();
}

void say(const Communicator& world, const char* what) {
  if (world.rank() != 0) return;
  std::puts(what);
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** words) {
  try {
    const std::vector<std::string_view> options(words + std::min(count, 2), words + count);
    const bool gloo = std::ranges::count(options, "--gloo") > 0;
    const bool keeps = options.size() > 1 && options[options.size() - 2] == "--keep";
    TrainingOptions how{.stage = 3, .threads = 1};
    if (keeps) {
      how.state = Tier::nvme;
      how.drives = {.directories = {options.back()}, .run = "tiny"};
    }
    const auto world = connect({.transport = gloo ? HostTransport::gloo : HostTransport::fastest});
    say(*world, "connected");
    Training training(model(), *world, {optim::AdamW{}}, how);
    training.start(begin_at_zero);
    world->barrier();
    say(*world, "started");
    const std::filesystem::path checkpoint = keeps ? std::filesystem::path(options.back()) / "checkpoint" : "";
    if (keeps && training.load(checkpoint)) say(*world, "loaded");
    const int steps = count > 1 ? std::atoi(words[1]) : 1;
    for (int i = 0; i < steps; ++i) {
      step(training);
      if (i == 0) say(*world, "first step");
    }
    training.finish();
    if (keeps) {
      training.save(checkpoint);
      say(*world, "saved");
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

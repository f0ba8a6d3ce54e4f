// Trainings of a named run, on threads as ranks, for the tests of resuming.
#pragma once

#include <ballast/tensor_state.h>

#include <fmt/format.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>

#include "kernels/state_access.h"
#include "tests/temporary_directory.h"
#include "tests/zero/forwarding_communicator.h"
#include "tests/zero/training_rig.h"

namespace ballast::testing {

inline constexpr std::size_t steps_before = 3;  // the steps before a run is continued, moved or damaged

inline Model two_layers() {
  return {{{.name = "h",
            .tensors = {{"first", {20, 16}}, {"second", {20, 16}}, {"kept", {256}, 0, true}, {"adapter", {256}}}}}};
}

// Kills the process when this rank comes to its nth agreement with the others.
class KillingCommunicator final : public ForwardingCommunicator {
 public:
  KillingCommunicator(Communicator& inner, std::size_t agreements) : ForwardingCommunicator(inner), left_(agreements) {}

  using ForwardingCommunicator::all_reduce;
  void all_reduce(std::span<std::int64_t> values, Purpose purpose) override {
    if (--left_ == 0) std::raise(SIGKILL);
    ForwardingCommunicator::all_reduce(values, purpose);
  }
  using ForwardingCommunicator::split;
  std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel) override {
    return part(color, channel);
  }

 private:
  std::size_t left_;
};

// Fails on this rank when it has come to its nth agreement with the others.
class FailingCommunicator final : public ForwardingCommunicator {
 public:
  FailingCommunicator(Communicator& inner, std::size_t agreements) : ForwardingCommunicator(inner), left_(agreements) {}

  using ForwardingCommunicator::all_reduce;
  void all_reduce(std::span<std::int64_t> values, Purpose purpose) override {
    ForwardingCommunicator::all_reduce(values, purpose);
    if (--left_ == 0) throw std::runtime_error("a failure of the test");
  }
  using ForwardingCommunicator::split;
  std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel) override {
    return part(color, channel);
  }

 private:
  std::size_t left_;
};

// A training of a run, some steps long.
struct KeptRun {
  std::filesystem::path directory{};
  std::filesystem::path second{};  // a directory on another drive
  Model model = two_layers();
  std::vector<optim::Rule> rules{optim::AdamW{.lr = 0.02}};
  std::size_t ranks = 2;
  std::vector<std::string>
      hosts{};  // the folder that only ranks of a rank's host see, for each rank; empty: all see the directory
  bool shows_values = false;
  std::size_t killed_at = SIZE_MAX;  // the agreement of the last rank at which the process is killed
  std::size_t fails_at = SIZE_MAX;   // the agreement of the last rank after which it fails
  int progress = -1;                 // descriptor on which rank 0 writes a byte for each step; -1: nowhere
  std::size_t data = 0;              // the number of the data that it trains on
  TrainingOptions options = {.stage = 3, .state = all_in(Tier::nvme), .tile_elements = 128};
};

// The state of all elements of a tensor, in fp32.
struct TensorValues {
  std::vector<float> master{};
  std::vector<float> momentum{};
  std::vector<float> variance{};
  bool operator==(const TensorValues&) const = default;

  explicit TensorValues(std::size_t elements = 0) : master(elements), momentum(elements), variance(elements) {}

  TileMemory memory() {
    const auto bytes = [](std::vector<float>& values) { return reinterpret_cast<std::byte*>(values.data()); };
    return {.format = StateFormat::fp32,
            .parameter_dtype = DType::fp32,
            .parameter = bytes(master),
            .momentum = bytes(momentum),
            .variance = bytes(variance),
            .count = master.size()};
  }
};
using AllValues = std::map<std::string, TensorValues>;  // the keys are names of tensors

struct Ended {  // one entry of each vector for each rank
  std::vector<std::string> failures{};
  std::vector<std::uint64_t> began_at{};  // step
  std::vector<std::vector<std::byte>> parameters{};
  AllValues values{};  // the values of trained tensors, of all ranks
};

// Adds the values of this rank's elements.
inline void add_values(Training& training, AllValues& values, std::mutex& mutex) {
  TensorState(training).visit([&](const StatePart& part) {
    if (part.frozen) return;
    const Tensor& tensor = training.model().units[part.unit].tensors[part.tensor];
    const std::lock_guard lock(mutex);
    TensorValues& all = values.try_emplace(tensor.name, tensor.elements()).first->second;
    kernels::copy_state(part.memory, kernels::part(all.memory(), part.first, part.memory.count));
  });
}

// Returns the drive of a rank's host, which is there before the job starts.
inline std::filesystem::path drive_of(const KeptRun& run, const std::filesystem::path& directory, std::size_t rank) {
  const std::filesystem::path drive = directory / run.hosts[rank];
  std::filesystem::create_directories(drive);
  return drive;
}

inline Ended train(KeptRun run, std::size_t steps) {
  run.options.drives.directories = {run.directory};
  if (!run.second.empty()) run.options.drives.directories.push_back(run.second);
  run.options.drives.run = "mine";
  std::mutex mutex;
  Ended ended{.began_at = std::vector<std::uint64_t>(run.ranks),
              .parameters = std::vector<std::vector<std::byte>>(run.ranks)};
  ended.failures = failures_of_ranks(run.ranks, [&](Communicator& world) {
    TrainingOptions options = run.options;
    if (!run.hosts.empty()) {
      options.drives.directories = {drive_of(run, run.directory, world.rank())};
      options.drives.host = run.hosts[world.rank()].substr(0, 1);
    }
    const bool is_last = world.rank() + 1 == run.ranks;
    KillingCommunicator killing(world, is_last ? run.killed_at : SIZE_MAX);
    FailingCommunicator group(killing, is_last ? run.fails_at : SIZE_MAX);
    Training training(run.model, group, run.rules, options);
    training.start(initial_parameters());
    ended.began_at[world.rank()] = training.steps();
    SyntheticTrainer trainer(run.model, world.rank());
    for (std::size_t step = 0; step < steps; ++step) {
      trainer.run(training, 1000 * run.data + training.steps());
      training.step();
      if (run.progress >= 0 && world.rank() == 0) CHECK(::write(run.progress, "", 1) == 1);
    }
    training.finish();
    if (run.shows_values) add_values(training, ended.values, mutex);
    for (std::size_t unit = 0; unit < run.model.units.size(); ++unit)
      add_bytes(run.model.units[unit], training.forward(unit), nullptr, ended.parameters[world.rank()]);
  });
  return ended;
}

inline std::filesystem::path directory_of(const KeptRun& run, std::size_t rank) {
  return run.directory / fmt::format("mine-rank-{}", rank);
}

inline void replace(const std::filesystem::path& directory, const std::filesystem::path& by) {
  std::filesystem::remove_all(directory);
  std::filesystem::copy(by, directory, std::filesystem::copy_options::recursive);
}

// Returns the contents of all files but the locks, which name their holders.
inline std::map<std::string, std::string> contents(const std::filesystem::path& directory) {
  std::map<std::string, std::string> contents;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file() || entry.path().filename() == "ballast.lock") continue;
    std::ifstream file(entry.path(), std::ios::binary);
    contents[entry.path().string()] = {std::istreambuf_iterator<char>(file), {}};
  }
  return contents;
}

// Checks that all ranks fail with the same error, and that the run is as it was.
template <class Matcher>
void check_refused(const KeptRun& run, const Matcher& as_it_should) {
  const auto before = contents(run.directory);
  const Ended ended = train(run, 1);
  for (const std::string& failure : ended.failures) {
    CHECK_THAT(failure, as_it_should);
    CHECK(failure == ended.failures.front());
  }
  CHECK(contents(run.directory) == before);
}

}  // namespace ballast::testing

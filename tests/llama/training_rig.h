// Runs the whole trainer on threads as ranks, to be compared bit by bit.
#pragma once

#include <bit>
#include <ostream>
#include <string>
#include <thread>

#include "benchmarks/training/run.h"
#include "tests/temporary_directory.h"
#include "zero/comm/thread_communicator.h"

namespace ballast::testing {

// The bits that must be equal: of losses and norms, and a hash of all parameters at the end.
struct Outcome {
  std::vector<std::pair<double, double>> steps{};
  std::uint64_t parameters = 0;
  std::uint64_t first_step = 0;

  bool operator==(const Outcome&) const = default;
};

inline std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
  out << std::hexfloat;
  for (const auto& [loss, norm] : outcome.steps) {
    out << loss << ' ' << norm << '\n';
  }
  return out << std::hex << outcome.parameters;
}

inline benchmarks::RunOptions tiny_run() {
  benchmarks::RunOptions run;
  run.model = {.vocabulary = 256, .hidden = 32, .layers = 2, .heads = 4, .kv_heads = 2, .tied = true};
  run.batch = {.sequences = 2, .context = 16, .chunk = 12};
  run.steps = 3;
  run.rule.lr = 0.01;
  run.training.tile_elements = 4096;
  run.hashes_parameters = true;
  return run;
}

inline Outcome outcome_of(const benchmarks::RunOptions& options, Communicator& world, llama::Maths& maths) {
  Outcome outcome;
  outcome.parameters =
      benchmarks::train(options, world, maths, [&](const benchmarks::Start&, const benchmarks::Step& step) {
        if (outcome.steps.empty()) outcome.first_step = step.step;
        outcome.steps.emplace_back(step.loss, step.result.norm);
      });
  return outcome;
}

// Trains one rank, with one CPU thread or on a GPU.
inline Outcome train_rank(const benchmarks::RunOptions& options, ThreadGroup& group, std::size_t rank) {
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto maths = options.training.gpu ? llama::gpu_maths(0) : llama::cpu_maths(1);
  return outcome_of(options, *thread_communicator(group, rank, *backend), *maths);
}

// Returns rank 0's outcome. The parameters of all ranks must be the same.
inline Outcome train_llama(benchmarks::RunOptions options, std::size_t ranks) {
  const TemporaryDirectory directory;
  if (options.training.drives.directories.empty()) options.training.drives.directories = {directory.path()};
  ThreadGroup group(ranks, std::chrono::seconds(60));
  std::vector<Outcome> outcomes(ranks);
  std::vector<std::string> failures(ranks);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        outcomes[rank] = train_rank(options, group, rank);
      } catch (const std::exception& failure) {
        failures[rank] = failure.what();
        group.abort(failure.what());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  if (failures != std::vector<std::string>(ranks)) throw std::runtime_error(failures.front());
  for (const Outcome& outcome : outcomes) {
    if (outcome != outcomes.front()) throw std::runtime_error("ranks differ");
  }
  return outcomes.front();
}

}  // namespace ballast::testing

// Runs the whole trainer on threads as ranks, to be compared bit by bit.
#pragma once

#include <bit>
#include <ostream>
#include <string>
#include <thread>

#include "examples/gpt/run.h"
#include "kernels/runtime/stream.h"
#include "tests/temporary_directory.h"
#include "zero/comm/thread_communicator.h"

namespace ballast::testing {

// The bits that must be equal: of losses and norms, and a hash of all parameters at the end.
struct GptOutcome {
  std::vector<std::pair<double, double>> steps{};
  std::uint64_t parameters = 0;
  std::uint64_t first_step = 0;

  bool operator==(const GptOutcome&) const = default;
};

inline std::ostream& operator<<(std::ostream& out, const GptOutcome& outcome) {
  out << std::hexfloat;
  for (const auto& [loss, norm] : outcome.steps) {
    out << loss << ' ' << norm << '\n';
  }
  return out << std::hex << outcome.parameters;
}

class Recorder : public gpt::Observer {
 public:
  void step(const gpt::Step& step) override {
    if (outcome.steps.empty()) outcome.first_step = step.step;
    outcome.steps.emplace_back(step.loss, step.norm);
  }
  void end(const gpt::End& end) override { outcome.parameters = end.parameters_hash; }

  GptOutcome outcome{};
};

inline gpt::RunOptions tiny_run() {
  return {.shape = {.layers = 2, .width = 32, .heads = 2, .context = 16},
          .batch = 2,
          .steps = 3,
          .lr = 0.01,
          .training = {.tile_elements = 4096},
          .measures_rate = false};
}

// Trains one rank, with one CPU thread or on a GPU.
inline void train_gpt_rank(gpt::RunOptions options, ThreadGroup& group, std::size_t rank, Recorder& recorder) {
  std::optional<Stream> stream;
  if (options.training.gpu) stream.emplace(*options.training.gpu);
  if (stream) options.training.stream = stream->handle();
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto maths = stream ? gpt::gpu_maths(stream->handle(), stream->gpu()) : gpt::cpu_maths(1);
  gpt::train(options, *thread_communicator(group, rank, *backend), *maths, recorder);
}

// Returns rank 0's outcome. The parameters of all ranks must be the same.
inline GptOutcome train_gpt(gpt::RunOptions options, std::size_t ranks) {
  const TemporaryDirectory directory;
  if (options.training.drives.directories.empty()) options.training.drives.directories = {directory.path()};
  ThreadGroup group(ranks, std::chrono::seconds(60));
  std::vector<Recorder> recorders(ranks);
  std::vector<std::string> failures(ranks);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        train_gpt_rank(options, group, rank, recorders[rank]);
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
  for (const Recorder& recorder : recorders) {
    if (recorder.outcome != recorders.front().outcome) throw std::runtime_error("ranks differ");
  }
  return recorders.front().outcome;
}

}  // namespace ballast::testing

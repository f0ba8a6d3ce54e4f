// A training: the model, its steps, and where they keep their memory. The command line sets it, or a test.
#pragma once

#include <ballast/training.h>

#include <CLI/CLI.hpp>

#include "benchmarks/harness/measure.h"
#include "examples/llama/llama.h"

namespace ballast::benchmarks {

struct RunOptions {
  llama::Config model{.vocabulary = 256, .hidden = 768, .layers = 8, .heads = 12, .tied = true};
  llama::Batch batch{};
  std::size_t steps = 20;
  double lr = 1e-4;
  TrainingOptions training{};
  std::size_t ranks = 1;  // ranks of this process, as threads
  bool on_gpu = false;    // rank r on the GPU r of its machine
  bool forecasts = false;
  bool waits_for_updates = false;  // false: updates overlap the next forward pass
  bool hashes_parameters = false;  // reads all parameters at the end
  ResidentMemory before{};         // the resident memory when the program began
};

void describe(CLI::App& app, RunOptions& options);

}  // namespace ballast::benchmarks

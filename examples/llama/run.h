// A training of a Llama, without its data: the options that a command line sets, and what follows from them.
#pragma once

#include <ballast/comm.h>
#include <ballast/training.h>

#include <functional>

#include "examples/llama/llama.h"

namespace CLI {
class App;
}

namespace ballast::llama {

struct TrainerOptions {
  Config model{};
  Batch batch{};
  TrainingOptions training{};
  optim::AdamW rule{.lr = 1e-4, .beta2 = 0.95, .weight_decay = 0.1};  // of matrices; vectors have no weight decay
  std::uint64_t steps = 20;
  std::uint64_t seed = 1;  // of new values, and of the sequences that are drawn
  std::size_t ranks = 1;   // ranks of this process, as threads
  bool on_gpu = false;     // rank r on the GPU r of its machine
};

// The options of every program that trains a Llama. Their defaults are the values that are there.
void describe(CLI::App& app, TrainerOptions& options);

// The maths of a rank. Sets the threads, if they are 0, to the rank's share of the cores. Throws B1001 where a launcher has started
// another number of ranks than the options name.
std::unique_ptr<Maths> maths_of(TrainerOptions& options, const Communicator& world);

// Sets what follows from the model, from the schedule and from the maths.
void complete(TrainerOptions& options, const Maths& maths);

Groups rules_of(const TrainerOptions& options);

// Returns the sequences of a micro-step, of context + 1 tokens each, one after the other. Another key gives others.
using Draw = std::function<std::vector<std::uint32_t>(std::uint64_t key)>;

// Runs the micro-steps of a step. Returns the mean loss of this rank.
double run_micro_steps(Llama& llama, Training& training, const TrainerOptions& options, std::size_t rank,
                       const Draw& draw);

}  // namespace ballast::llama

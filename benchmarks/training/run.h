// The training of a rank from its first step to its last.
#pragma once

#include <CLI/CLI.hpp>

#include "benchmarks/harness/measure.h"
#include "examples/llama/run.h"

namespace ballast::benchmarks {

struct RunOptions : llama::TrainerOptions {
  RunOptions() { model = {.vocabulary = 256, .hidden = 768, .layers = 8, .heads = 12, .tied = true}; }

  bool forecasts = false;
  bool waits_for_updates = false;  // false: updates overlap the next forward pass
  bool hashes_parameters = false;  // reads all parameters at the end
  ResidentMemory before{};         // the resident memory when the program began
};

void describe(CLI::App& app, RunOptions& options);

// The work of one rank on drives in a step that follows the program.
struct DriveWork {
  std::size_t read_bytes = 0;
  std::size_t written_bytes = 0;
  std::size_t record_bytes = 0;  // bytes of one read or write
  std::size_t records = 0;       // reads or writes in flight at once
};

DriveWork drive_work_of(const CompiledPlan& plan);

// Returns the resident memory of this process that is announced. Throws B2202 if a drive is too small.
std::size_t announced_memory(const RunOptions& options, const Plan& plan);

// Returns the seconds of a step by the simulator, with the rates of this machine, which all ranks measure together, and the time of
// the arithmetic of one layer.
double forecast(const RunOptions& options, const Plan& plan, Communicator& world, llama::Maths& maths);

// The facts that this rank knows before it reserves anything.
struct Start {
  std::size_t announced_bytes = 0;  // of this process
  DriveWork drive_work{};
  std::optional<double> forecast_seconds{};
};

// A step of all ranks; memory is of this rank.
struct Step {
  std::uint64_t step = 0;
  double loss = 0;
  double seconds = 0;
  double tokens_per_second = 0;
  TierBytes bytes{};         // bytes that the training reserves, and activations
  double forward_share = 0;  // the forward pass's part of the arithmetic, without updates
  StepResult result{};
  ResidentMemory resident{};  // this process's memory; the peak since the first step
};

// Begins, or resumes the run of this name, and calls `report` after each step. Returns a hash of all parameters, equal for equal
// bits, or 0 if the options request none.
std::uint64_t train(const RunOptions& options, Communicator& world, llama::Maths& maths,
                    const std::function<void(const Start&, const Step&)>& report);

}  // namespace ballast::benchmarks

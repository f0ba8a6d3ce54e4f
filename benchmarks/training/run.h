// The training of a rank from its first step to its last, and the observer of its steps.
#pragma once

#include <algorithm>
#include <array>
#include <filesystem>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/training/needs.h"
#include "examples/llama/llama.h"

namespace ballast::benchmarks {

struct RunOptions {
  llama::Config model{};
  llama::Batch batch{};
  std::size_t steps = 20;
  double lr = 1e-4;
  double weight_decay = 0.1;
  std::uint64_t seed = 1;
  std::vector<std::filesystem::path> text{};  // empty: made-up sequences
  TrainingOptions training{};
  bool measures_rate = true;
  bool forecasts = false;
  bool waits_for_updates = false;  // false: updates overlap the next forward pass
  bool hashes_parameters = true;   // the hash at the end reads all parameters
  bool keeps_parameters = false;   // true: End has the parameters
  MemoryOptions memory{};
};

// The forecast of a step, made before the first one.
struct Forecast {
  Machine machine{};
  Simulation step{};
  double forward_share = 0;  // the forward pass's part of the arithmetic, without updates
};

// All ranks call it together, each with the plan of its training. For CPUs only.
Forecast forecast(const RunOptions& options, const Plan& plan, Communicator& world, llama::Maths& maths);

// Returns operations a second: the fastest of square products of a few sizes in this format.
double measure_matrix_rate(llama::Maths& maths, DType dtype);

// Takes at least one value: one slow step or round does not change the median. Of an even number of values, returns the mean of
// the two in the middle.
inline double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t above = values.size() / 2;
  return std::midpoint(values[(values.size() - 1) / 2], values[above]);
}

// The facts that this rank knows before it reserves anything.
struct Start {
  std::size_t ranks = 1;
  std::size_t parameters = 0;
  std::string library{};
  bool on_gpu = false;
  double matrix_rate = 0;  // operations a second of square products in the model's format; 0: not measured
  Ledger ledger{};
  Needs needs{};
  std::size_t most_resident = 0;  // the peak so far; memory of measurements is freed by now
  DriveWork drive_work{};
  std::optional<Forecast> forecast{};
};

// A step of all ranks; memory is of this rank.
struct Step {
  std::uint64_t step = 0;
  double loss = 0;
  double norm = 0;
  double seconds = 0;
  double tokens_per_second = 0;
  double mfu = 0;             // the share of the matrix rate, without recomputation
  double matrix_use = 0;      // the same while the trainer computes, with recomputation
  TierBytes bytes{};          // bytes that the training reserves, and activations
  Metrics metrics{};          // this rank's metrics
  ResidentMemory resident{};  // this process's memory; the peak since the first step
  std::string skipped{};      // the reason, or empty
};

struct End {
  std::string trace{};                // empty unless the training keeps a timeline
  std::uint64_t parameters_hash = 0;  // equal for equal bits
  std::vector<float> parameters{};    // values in the order of units and tensors
};

// Called on the thread of the rank.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void begin(const Start&) {}
  virtual void step(const Step&) {}
  virtual void end(const End&) {}
};

// Begins, or resumes the run of this name. The caller owns `maths` and the communicator.
void train(const RunOptions& options, Communicator& world, llama::Maths& maths, Observer& observer);

}  // namespace ballast::benchmarks

// A rank's training from its first step to its last one, and what can be seen of it meanwhile.
#pragma once

#include <array>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "examples/gpt/drive_work.h"
#include "examples/gpt/maths.h"
#include "examples/gpt/model.h"
#include "examples/gpt/needs.h"

namespace ballast::gpt {

struct RunOptions {
  Shape shape{};
  std::size_t batch = 8;  // sequences of a rank's micro-step
  std::size_t steps = 20;
  double lr = 1e-4;
  double weight_decay = 0.1;
  std::uint64_t seed = 1;
  std::vector<std::filesystem::path> text{};
  TrainingOptions training{};
  bool measures_rate = true;
  bool forecasts = false;
  bool waits_for_updates = false;  // instead of letting them go on beside the next forward pass
  bool hashes_parameters = true;   // for the end, which reads all of them
  bool keeps_parameters = false;   // the same
  MemoryOptions memory{};
};

// Of a step, made before the first one.
struct Forecast {
  Machine machine{};
  Simulation step{};
  double forward_share = 0;  // of the arithmetic, without updates
};

// Of this rank, before it reserves anything.
struct Start {
  std::size_t ranks = 1;
  std::size_t parameters = 0;
  std::size_t text_bytes = 0;
  std::string library{};
  double matrix_rate = 0;  // operations a second that square products in the model's format reach; 0: not measured
  Ledger ledger{};
  Needs needs{};
  std::size_t most_resident = 0;  // so far: what measuring took is given back
  DriveWork drive_work{};
  std::optional<Forecast> forecast{};
};

// Of all ranks, but for memory, which is this rank's.
struct Step {
  std::uint64_t step = 0;
  double loss = 0;
  double norm = 0;
  double seconds = 0;
  double tokens_per_second = 0;
  double mfu = 0;             // of the matrix rate, without what is computed twice
  double matrix_use = 0;      // the same while the trainer computes, and with what is computed twice
  TierBytes bytes{};          // held: what the training reserves, and activations
  Metrics metrics{};          // this rank's
  ResidentMemory resident{};  // of this process, its peak since the first step was prepared
  std::string skipped{};      // why
};

struct End {
  std::string trace{};                // of a training that keeps a timeline
  std::uint64_t parameters_hash = 0;  // the same for the same bits
  std::vector<float> parameters{};    // in the order of units and tensors
};

// Used on the rank's thread.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void begin(const Start&) {}
  virtual void step(const Step&) {}
  virtual void end(const End&) {}
};

// Begins, or goes on where the run of this name was; `maths` and the ranks are the caller's.
void train(const RunOptions& options, Communicator& world, Maths& maths, Observer& observer);

}  // namespace ballast::gpt

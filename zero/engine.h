// Runs a program: walks its list, one operation after the other. It knows neither stages nor tiers.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "kernels/runtime/buffer.h"
#include "offload/record_store.h"
#include "offload/staging_pool.h"
#include "optim/decision.h"
#include "optim/state_layout.h"
#include "zero/comm/communicator.h"
#include "zero/layout.h"
#include "zero/program.h"

namespace ballast {

// What the engine works with; all of it outlives the engine.
struct EngineParts {
  const Model& model;
  const Layout& layout;
  const Program& program;
  const optim::StateLayout& state;
  Communicator& shard_group;
  Communicator& replica_group;
  kernels::Backend& backend;
  MemoryAccounts& accounts;
  offload::RecordStore* records = nullptr;  // where the program reads and writes tiles
};

struct StepOptions {
  std::span<const optim::Rule> groups;  // by parameter group
  double max_norm = optim::no_clipping;
  double loss_scale = 1.0;  // the one that the step's gradients were made with
};

// Memory that the trainer may use until its next call.
struct Lease {
  ConstView parameters;
  View gradients;  // in backward: zeroed, to be added to
};

// Used by one thread, its rank's. An operation that throws is not passed over: the same call, made again, begins with
// it, so that nothing is ever trained on a tile that could not be read.
class Engine {
 public:
  explicit Engine(const EngineParts& parts);  // reserves every slot; a program that reads tiles needs records

  // The units' first parameters, laid out with their padding. State begins at zero.
  void initialise(std::span<const ConstView> units);

  Lease forward(std::size_t unit) { return use(unit, Phase::forward); }
  Lease backward(std::size_t unit) { return use(unit, Phase::backward); }
  optim::Decision step(const StepOptions& options);

  std::uint64_t steps() const { return steps_; }

 private:
  Lease use(std::size_t unit, Phase phase);
  void check(const StepOptions& options) const;
  void run_next();
  void run(const Op& op);
  void agree();
  void read(const Op& op);
  void update(const Op& op);
  void write(const Op& op);
  void set_parameters(const Op& op, const ConstView& unit);
  View view(const Piece& piece);
  Communicator& ranks(const Op& op);
  std::size_t record(const Op& op) const;
  Range in_unit(const Op& op) const;

  EngineParts parts_;
  std::vector<Buffer> slots_;
  std::optional<offload::StagingPool> staging_;  // through which records pass
  std::vector<std::size_t> first_record_;        // of each unit
  std::size_t next_ = 0;                         // operation to run
  std::uint64_t steps_ = 0;                      // updates made
  kernels::ExactSum norm_;
  StepOptions options_;
  optim::Decision decision_;
  std::vector<kernels::GroupStep> group_steps_;
};

}  // namespace ballast

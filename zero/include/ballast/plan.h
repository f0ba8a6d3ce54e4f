// The options of a training, and the plan that they lead to.
#pragma once

#include <ballast/gradient_format.h>
#include <ballast/log.h>
#include <ballast/memory.h>
#include <ballast/model.h>
#include <ballast/optim.h>
#include <ballast/placement.h>
#include <ballast/planner.h>
#include <ballast/records.h>
#include <ballast/schedule.h>
#include <ballast/state_format.h>
#include <ballast/wire.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace ballast {

class Communicator;
class CompiledPlan;   // the library's own
class ExchangeOrder;  // likewise

struct TrainingOptions {
  int stage = 3;
  std::size_t replicas = 1;  // of stages 1 to 3: groups of ranks that each have a copy of the state
  // Of stage 3: groups of neighbouring ranks that each have a copy of the parameters, while all share the state. With a
  // group for each host, uses gather inside of the hosts only. The parameters are on the device.
  std::size_t parameter_replicas = 1;
  Spread parameters{};  // by default everything is on the device
  Spread gradients{};
  Spread state{};
  Reduction reduction = Reduction::each;
  RecordOptions drives{};
  StateFormat format = StateFormat::split;                // of bf16 parameters; others have fp32 state
  GradientFormat gradient_format = GradientFormat::fp32;  // of the reduced gradients of bf16 parameters
  // At most in a tile, which is updated and moved at once; a run keeps those it began with. 0: one tile for what a rank
  // keeps of a unit on the device; elsewhere 256 Ki to 2 Mi.
  std::size_t tile_elements = 0;
  // Micro-steps whose gradients a step averages; StepOptions::micro_steps names another number for one step. A step is refused
  // (B1007) if units were used in backward, and none of them as often as so many micro-steps use it: see `trace`.
  std::size_t micro_steps = 1;
  bool sums_micro_steps = false;  // a step adds the gradients of any number of micro-steps instead, as PyTorch does
  Trace trace{};  // of each micro-step, if it is known; else in order of declaration, until another order comes twice
  Schedule schedule{};
  Wire wire{};  // exact by default
  double max_norm = optim::no_clipping;
  // Ranks with other parts of the same model: the norm is over theirs too. Outlives the training.
  Communicator* norm_group = nullptr;
  bool keeps_timeline = false;     // of what ran when
  std::size_t verify = 0;          // every so many steps a tile's update is made twice and compared; 0: never
  int threads = 0;                 // of updates and memory of the CPU; 0: one for each core that this process may use
  std::optional<int> gpu{};        // whose memory the device tier is; none: the host's
  StreamHandle stream = nullptr;   // on that GPU: what leases are for; outlives the training
  Allocator* allocator = nullptr;  // of the device tier's memory, instead of our own; outlives the training
  // Shared by the trainings on one GPU that one thread drives, such as those of one model: it gives their exchanges one order,
  // which NCCL requires. Null: this training has its own.
  std::shared_ptr<ExchangeOrder> exchanges{};
};

std::shared_ptr<ExchangeOrder> make_exchange_order();

// The position of a rank among all ranks of a training.
struct RankOf {
  std::size_t rank = 0;
  std::size_t ranks = 1;
  std::size_t ranks_per_host = 1;  // Communicator::ranks_per_host() of all ranks
};

// A training before anything is reserved: the program of its step, the memory that it reserves, and how long a step takes.
// The ranks need not exist. A pure value.
class Plan {
 public:
  // The same arguments as Training's.
  Plan(Model model, const RankOf& position, const std::vector<optim::Rule>& groups,
       const TrainingOptions& options = {});
  Plan(Plan&&) noexcept;
  ~Plan();

  const Model& model() const;
  const Placement& placement() const;
  Ledger ledger() const;  // the training reserves exactly these bytes
  // Predicts the time of a step. `work` is by unit.
  Simulation simulate(const Machine& machine, std::span<const UnitWork> work) const;
  std::string to_text() const;  // the program: one slot or operation a line

  const CompiledPlan& compiled() const { return *compiled_; }

 private:
  std::unique_ptr<const CompiledPlan> compiled_;
};

}  // namespace ballast

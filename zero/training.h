// The C++ API: a model, ranks, an optimizer and where things are kept, put together to a training.
//
//   auto world = ballast::connect({.backend = *backend, .accounts = accounts});
//   ballast::Training training(model, *world, {ballast::optim::AdamW{}}, {.stage = 3, .state = all_in(Tier::nvme), ...});
//   training.initialise(source);
//   for (...) {
//     for (each unit) { const auto lease = training.forward(unit); ... lease.tensor(0) ... }
//     for (each unit, backwards) { const auto lease = training.backward(unit); ... lease.gradient(0) ... }
//     const auto result = training.step();
//   }
#pragma once

#include "zero/engine/engine.h"
#include "zero/plan/ledger.h"
#include "zero/records.h"

namespace ballast {

struct TrainingOptions {
  int stage = 3;
  std::size_t replicas = 1;  // of stages 1 to 3: groups of ranks that each have a copy of the state
  Spread parameters{};       // by default everything is on the device
  Spread gradients{};
  Spread state{};
  Reduction reduction = Reduction::each;
  RecordOptions drives{};
  kernels::StateFormat format = kernels::StateFormat::split;
  std::size_t tile_elements = std::size_t{256} << 10;
  std::size_t micro_steps = 1;
  Trace trace{};  // of each micro-step, if it is known; else in order of declaration, until another order comes twice
  Schedule schedule{};
  double max_norm = optim::no_clipping;
  // Ranks with other parts of the same model: the norm is over theirs too. Outlives the training.
  Communicator* norm_group = nullptr;
  bool keeps_timeline = false;    // of what ran when
  std::size_t verify = 0;         // every so many steps a tile's update is made twice: see corruption_check.h; 0: never
  int threads = 0;                // of updates on the CPU; 0: one for each core that this process may use
  std::optional<int> gpu{};       // whose memory the device tier is; none: the host's
  StreamHandle stream = nullptr;  // on that GPU: what leases are for; outlives the training
  Allocator* allocator = nullptr;  // of the device tier's memory, instead of our own; outlives the training
};

// What this rank's training would be planned with: for a Plan to look at before anything is reserved.
PlanOptions plan_options(const TrainingOptions& options, const Communicator& world,
                         const std::vector<optim::Rule>& groups);

// Used by one thread, its rank's trainer.
class Training {
 public:
  // Reserves all memory and makes all files. `groups` are the rules of the parameter groups, and of one kind; `world`
  // outlives the training. All ranks make theirs together.
  Training(Model model, Communicator& world, std::vector<optim::Rule> groups, const TrainingOptions& options = {});

  // Whether the drives hold a step of this run to go on from: then resume(), else initialise().
  bool found() const { return records_ && records_->found(); }
  void initialise(const ParameterSource& source) { engine_->initialise(source); }
  void resume(const ParameterSource& frozen) { engine_->resume(frozen); }
  void start(const ParameterSource& source) { found() ? resume(source) : initialise(source); }  // whichever fits

  Lease forward(std::size_t unit) { return engine_->forward(unit); }
  Lease backward(std::size_t unit);
  StepResult step(double loss_scale = 1.0);

  std::vector<optim::Rule>& groups() { return groups_; }  // to be changed between steps: a learning rate, say
  std::uint64_t steps() const { return engine_->steps(); }
  const Model& model() const { return plan_.model(); }
  const Plan& plan() const { return plan_; }
  const MemoryAccounts& memory() const { return accounts_; }
  Ledger ledger() const { return ledger_of(engine_->program(), plan_.blocks().records()); }
  Engine& engine() { return *engine_; }
  const Engine& engine() const { return *engine_; }
  const Timeline& timeline() const;  // to be read after engine().finish()
  std::string chrome_trace() const { return timeline().to_chrome_trace(plan_.model(), rank_); }

 private:
  void prepare();
  StepOptions step_options(double loss_scale) const { return {groups_, options_.max_norm, loss_scale}; }

  TrainingOptions options_;
  std::vector<optim::Rule> groups_;
  Plan plan_;
  std::unique_ptr<kernels::Backend> backend_;
  MemoryAccounts accounts_;
  std::optional<Records> records_;
  std::optional<GpuLanes> gpu_;
  Mesh mesh_;
  std::size_t rank_;
  std::optional<Timeline> timeline_;
  std::optional<Engine> engine_;
};

}  // namespace ballast

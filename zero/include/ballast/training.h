// The C++ API: a model, its ranks, an optimizer and the tiers of its state, put together to a training; its options, and the plan
// that they lead to.
//
//   const auto world = ballast::connect();
//   ballast::Training training(model, *world, {ballast::optim::AdamW{}}, {.stage = 3, .state = Tier::host});
//   training.start(source);  // resumes a run that is on drives
//   for (...) {
//     for (each unit) { const auto lease = training.forward(unit); ... lease[0] ... }
//     for (each unit, backwards) { const auto lease = training.backward(unit); ... lease.gradient(0) ... }
//     const auto result = training.step();
//   }
#pragma once

#include <ballast/comm.h>
#include <ballast/lease.h>
#include <ballast/local_state.h>
#include <ballast/memory.h>
#include <ballast/model.h>
#include <ballast/optim.h>
#include <ballast/placement.h>
#include <ballast/planner.h>
#include <ballast/records.h>
#include <ballast/schedule.h>
#include <ballast/state_format.h>
#include <ballast/step.h>
#include <ballast/view.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ballast {

class CompiledPlan;   // the library's own
class ExchangeOrder;  // likewise
class TrainingState;  // what frameworks need of a training: training_state.h

struct TrainingOptions {
  int stage = 3;
  std::size_t replicas = 1;  // stages 1 to 3 have groups of ranks that each have a copy of the state
  // Stage 3 has groups of neighbouring ranks that each have a copy of the parameters, while all share the state. With a
  // group for each host, uses gather inside of the hosts only. The parameters are on the device.
  std::size_t parameter_replicas = 1;
  Spread parameters{};  // everything is on the device by default
  Spread gradients{};
  Spread state{};
  Reduction reduction = Reduction::each;
  RecordOptions drives{};
  StateFormat format = StateFormat::split;                // the state of bf16 parameters; others have fp32 state
  GradientFormat gradient_format = GradientFormat::fp32;  // the reduced gradients of bf16 parameters
  // The limit of a tile, which is updated and moved at once; a run keeps those it began with. 0: one tile for what a
  // rank keeps of a unit on the device; elsewhere 256 Ki to 2 Mi.
  std::size_t tile_elements = 0;
  // Micro-steps whose gradients a step averages; StepOptions::micro_steps names another number for one step. A step is refused
  // (B1007) if units were used in backward, and none of them as often as so many micro-steps use it: see `trace`.
  std::size_t micro_steps = 1;
  bool sums_micro_steps = false;  // a step adds the gradients of any number of micro-steps instead, as PyTorch does
  // The uses of each micro-step, if known; else the order of declaration, until another order comes twice.
  Trace trace{};
  Schedule schedule{};
  TransferRates rates{.upload = 25e9, .download = 25e9, .host_memory = 60e9};  // PCIe 4 and two channels of DDR5
  Wire wire{};                                                                 // exact by default
  double max_norm = optim::no_clipping;
  // Ranks with other parts of the same model: the norm is over theirs too. Outlives the training.
  Communicator* norm_group = nullptr;
  bool keeps_timeline = false;  // records what ran when
  std::size_t verify = 0;       // every so many steps a tile's update is made twice and compared; 0: never
  Log* log = nullptr;           // outlives the training; null: warnings go to stderr
  int threads = 0;  // threads for updates and memory of the CPU; 0: this rank's share of the cores that it may use
  std::optional<int> gpu{};        // whose memory the device tier is; none: the host's
  StreamHandle stream = nullptr;   // the stream on that GPU that leases are for; outlives the training
  Allocator* allocator = nullptr;  // memory of the device tier comes from it, instead of our own; outlives the training
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
  bool shares_memory = false;      // Communicator::shares_memory() of all ranks
};

// The rules of the parameter groups, all of one kind: by the names of Model::groups, or in the order of the groups' numbers.
class Groups {
 public:
  struct Named {
    std::string group;
    optim::Rule rule;
  };
  Groups(std::vector<optim::Rule> rules)
      : rules_(std::move(rules)) {}  // NOLINT(google-explicit-constructor): they are that
  Groups(std::initializer_list<optim::Rule> rules) : rules_(rules) {}
  Groups(std::initializer_list<Named> rules) : named_(rules) {}

  // Returns the rules in the order of the groups' numbers. Throws B1001 if a group has no rule, or a rule no group.
  std::vector<optim::Rule> of(const Model& model) const;

 private:
  std::vector<optim::Rule> rules_{};
  std::vector<Named> named_{};
};

// A training before anything is reserved: the program of its step, the memory that it reserves, and how long a step takes.
// The ranks need not exist. A pure value.
class Plan {
 public:
  // The same arguments as Training's.
  Plan(Model model, const RankOf& position, const Groups& groups, const TrainingOptions& options = {});
  Plan(Plan&&) noexcept;
  ~Plan();

  const Model& model() const;
  const Placement& placement() const;
  Ledger ledger() const;  // the training reserves exactly these bytes
  // Predicts the time of a step. `work` is by unit.
  Simulation simulate(const Machine& machine, std::span<const UnitWork> work) const;
  std::string to_text() const;  // the program: one slot or operation a line

 private:
  friend const CompiledPlan& compiled(const Plan& plan);  // the library's own

  std::unique_ptr<const CompiledPlan> compiled_;
};

inline constexpr std::size_t max_note_bytes = 65'432;

// Threads: one thread, its rank's trainer, calls it.
// Order: the trainers of all ranks make the same calls and use units in the same order, which need not be the order of the
// plan. A step in another order is slower and has the same bits.
// Errors: when an operation fails on any rank, the communicators of all ranks are aborted, and every later call throws the
// first error. State on drives is then that of the last committed step.
// GPU: leases are for work in the trainer's stream. Their memory is ready, and is released, in the order of that stream.
// Only step() and finish() wait for the GPU.
class Training {
 public:
  // Reserves all memory and makes all files. Parameters and state on a GPU get theirs unit by unit when the training begins, so
  // that the source can free its own copy of the units before. `world` outlives the
  // training. All ranks construct theirs together.
  Training(Model model, Communicator& world, const Groups& groups, const TrainingOptions& options = {});
  Training(Training&&) = delete;
  ~Training();  // waits for operations in flight, ignores failures; in the middle of a step it aborts the other ranks

  // --- Begin: one of the three comes first, once. Optimizer state begins at zero, or comes from the records of a run.
  bool found() const;                         // whether the drives hold a step of this run to resume from
  void start(const ParameterSource& source);  // resume() if found(), else initialize()
  // Refused (B1007) if found(). RecordOptions::resume_at {0, 0} begins a run again.
  void initialize(const ParameterSource& source);
  void resume(const ParameterSource& frozen);

  // --- A step: leases of units, forward and backward, and then the step.
  Lease forward(std::size_t unit);
  Lease backward(std::size_t unit);

  // The norm of the gradients that the step would use, before clipping. All ranks call together. Backward uses may follow, except
  // with Reduction::boundary, and take the step off plan. Loss scale and micro-steps are those of StepOptions.
  double gradient_norm(double loss_scale = 1.0, std::optional<std::size_t> micro_steps = {});

  // Leaves a tensor as it is in this step, as torch does with a parameter that has no gradient: no decay, no change of its state.
  // Otherwise gradients that no rank has written are zeros. All ranks call it for the same tensors: before step(), or with
  // Schedule::update_in_backward before the unit's backward lease ends. StepOptions::missed counts it from the next step on.
  void leave_out(std::size_t unit, std::size_t tensor);

  // Says which rules and missed steps the next step will have, for the updates that it makes before it begins (Schedule::most_repeats):
  // before the backward pass. Otherwise they are those of the last step, or groups() where that had none of its own. A step that
  // has others makes its updates again. All ranks call it alike.
  void expect(std::span<const optim::Rule> groups, std::span<const std::uint64_t> missed = {});
  // Returns when the step is decided. Its updates may still run while the next forward begins. What the options leave out is
  // that of the training; with Schedule::update_in_backward only the first form is allowed, and the loss scale must be 1.
  StepResult step(double loss_scale = 1.0);
  StepResult step(const StepOptions& options);
  // Sets the options of the step that follows, which step() without any then ends: before the backward pass, if
  // Schedule::update_in_backward is set.
  void prepare(const StepOptions& options);
  void finish();  // waits until all operations are done

  std::vector<optim::Rule>& groups();              // the caller may change them between steps
  void set_lr(double lr);                          // of all groups, whatever their rule
  void set_lr(std::string_view group, double lr);  // of the group that Model::group() has named
  std::uint64_t steps() const;                     // updates made so far

  // --- Between steps, on all ranks together.
  // Writes the parameters, their state, the note and the number of steps to a checkpoint, as ballast.save() of Python does. It replaces
  // that of the directory, which all ranks share, once all of it is on the drive.
  void save(const std::filesystem::path& directory);
  // Loads the checkpoint of another training of the model and rule, in either language: on any number of ranks, at any stage, tier,
  // format and tile. Returns false if there is none. Rank r gets the note of rank r, in turns. A failure changes nothing, unless
  // chunks turn out to be damaged (B3202) or a drive fails (B3201) while they are read: then load another one, or end the training.
  [[nodiscard]] bool load(const std::filesystem::path& directory);

  // Bytes that each later commit of state on drives holds, up to max_note_bytes: what a trainer with a rule of its own has to keep
  // with the state, such as a count. It may set them in its update. A training that resumes a run has those of the resumed commit.
  void set_note(std::span<const std::byte> note);
  const std::vector<std::byte>& note() const;

  // --- Facts.
  const Model& model() const;
  const Plan& plan() const;
  Communicator& world() const;  // all ranks, for agreements of the caller's between other calls
  const MemoryAccounts& memory() const;
  Ledger ledger() const;    // the ledger of the program that runs now
  Metrics metrics() const;  // since the training was constructed

  // A training that keeps a timeline has these. Read them after finish().
  std::vector<UnitWork> unit_work() const;  // the mean time of the trainer's uses of each unit, for Plan::simulate()
  std::string chrome_trace() const;         // which operation ran when, for the trace viewers of Chrome and Perfetto

 private:
  friend TrainingState;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast

// Runs a program for one rank's trainer. It composes the classes of this folder, and is the only one that layers above
// call.
#pragma once

#include <ballast/lease.h>
#include <ballast/records.h>

#include "zero/engine/arithmetic.h"
#include "zero/engine/corruption_check.h"
#include "zero/engine/custom_update.h"
#include "zero/engine/off_plan.h"
#include "zero/engine/op_executor.h"
#include "zero/engine/record_mirror.h"
#include "zero/engine/startup.h"
#include "zero/engine/state_visitor.h"

namespace ballast {

// Frees the device tier's memory between steps, and reserves it again. Used by the trainer's thread; all ranks together.
class DeviceOffload {
 public:
  // All of it outlives this.
  struct Parts {
    const RunningProgram& running;
    Slots& slots;
    const LaneArithmetic& arithmetic;
    Scheduler& scheduler;
    OffPlan& off_plan;
  };
  explicit DeviceOffload(const Parts& parts) : parts_(parts) {}

  bool is_offloaded() const { return is_offloaded_; }

  // offload() discards uses in forward since the last step: the next step begins anew.
  void offload(bool parameters, const AgreeOnMemory& agree);
  void reload(const AgreeOnMemory& agree);

 private:
  std::size_t device_bytes() const;

  Parts parts_;
  bool is_offloaded_ = false;
};

// The engine's surroundings; all of it outlives the engine.
struct EngineParts {
  const CompiledPlan& plan;
  Mesh& mesh;
  kernels::Backend& backend;  // the CPU's, called by several lanes at once
  MemoryAccounts& accounts;
  RecordStores records{};                        // where the program reads and writes tiles
  MirrorFiles* mirror = nullptr;                 // where they are written too, on another rank's drive; null: nowhere
  Timeline* timeline = nullptr;                  // where to note which operation ran when; null: nowhere
  std::vector<offload::IoQueue*> queues{};       // queues of the records' drives
  GpuLanes* gpu = nullptr;                       // its memory is the device tier; null: the host's
  StreamHandle stream = nullptr;                 // the trainer's, on that GPU
  Allocator* allocator = nullptr;                // memory of the device tier comes from it, instead of ours
  int threads = 1;                               // that make host memory resident; 0: one for each usable core
  std::function<void(RunWrite)> before_write{};  // called before writes of a run: see RecordOptions
  bool sums_micro_steps = false;                 // see TrainingOptions
  std::size_t verify = 0;                        // check a tile's update every so many steps; see corruption_check.h
  // The order of exchanges between GPUs, shared with other trainings; null: of its own.
  std::shared_ptr<ExchangeOrder> exchanges{};
};

// The trainer may use units in any order. An off-plan step, which leaves the program's order, is served on demand to
// its end: with the same bits, but without prefetching. An order that comes twice in a row becomes the program of the
// following steps.
//
// Threads: one thread, its rank's trainer, calls the engine. Operations run on the lanes' threads.
// Order: the trainers of all ranks make the same calls, and use units in the same order.
// Errors: when an operation fails, on any lane, the peers' communicators are aborted and every later call throws the
// first error. State on drives is then that of the last committed step.
//
// On a GPU leases are for work in the trainer's stream: their memory is ready, and released, in the order of that
// stream. Only step() and finish() wait for the GPU.
class Engine {
 public:
  explicit Engine(const EngineParts& parts);  // reserves every slot; a program that reads tiles needs records
  Engine(Engine&&) = delete;
  ~Engine();  // waits for what is under way, ignores failures; in the middle of a step it aborts the other ranks

  // Call one of the two first, and once. Optimizer state begins at zero, or comes from records.
  void initialize(const ParameterSource& source);
  void resume(const ParameterSource& frozen);  // all trained tiles are in records; takes the newest committed step

  Lease forward(std::size_t unit) { return acquire(unit, Phase::forward); }
  Lease backward(std::size_t unit) { return acquire(unit, Phase::backward); }
  Lease exact_parameters(std::size_t unit);  // another use than forward(), if gathers are encoded

  // Sets the options of the next updates. step(options) calls it; where updates are made in the backward pass, call it
  // before.
  void prepare(const StepOptions& options);

  // See Training.
  double gradient_norm(double loss_scale, std::optional<std::size_t> micro_steps);
  std::vector<std::vector<double>> tensor_norms(double loss_scale, std::optional<std::size_t> micro_steps);
  void visit_gradients(const GradientVisitor& visit, std::optional<std::size_t> micro_steps);

  void leave_out(std::size_t unit, std::size_t tensor);  // see Training

  // Returns when the step is decided; its updates may still run while the next forward begins.
  StepResult step(const StepOptions& options);
  StepResult step();

  void wait_for_parameters(std::size_t unit);  // that the last step has changed, in the order of the trainer's stream
  void wait_for_commit();                      // waits for the last step's commit, also in the middle of the next one
  void finish();                               // waits until everything that was begun is done

  // Frees the device tier's memory until the return, between steps, on all ranks together; no other call is allowed
  // meanwhile. If `parameters` is false, the parameters stay there; otherwise the addresses of full parameters change.
  // `agree` is called on each rank, with an error if the rank lacks memory. It must throw on all ranks if any has an
  // error; then nothing has changed.
  void offload(bool parameters, const AgreeOnMemory& agree);
  void reload(const AgreeOnMemory& agree);

  bool prepared() const { return agreement_.is_prepared(); }
  std::uint64_t steps() const { return agreement_.steps(); }

  // Shows the local shards between steps, tile by tile, in host memory. Changed tiles on drives are committed together,
  // once `agree` has returned; if it throws, they stay as they were. Change full parameters that are kept in the same
  // way on all ranks. All ranks of a run change its state together: if one fails, none changes it; that one throws its
  // own error, the others B3301.
  void visit_state(
      const TileVisitor& look, const TileFilter& which = [](const LocalTile&) { return true; });
  void change_state(
      const TileVisitor& change, const std::function<void()>& agree = [] {});
  // Listed in the order of visits; without their memory.
  std::vector<LocalTile> local_tiles() const { return state_.tiles(); }
  void set_steps(std::uint64_t steps);

  // Bytes of the trainer that each later commit of state on drives holds; after resume(), those of the resumed commit.
  void set_note(std::span<const std::byte> note);
  const std::vector<std::byte>& note() const { return note_; }
  // Later commits belong to it. With one, a skipped step is committed too.
  void set_round(const JointRound& round) { round_ = round; }
  void parameters_changed();  // the caller changed full parameters that have no other copy
  void read_memory(const ConstView& view, std::byte* into) const { homes_.read(view, into); }  // a GPU's too
  View full_parameters(std::size_t unit) { return homes_.full_parameters(unit); }              // where they are kept

  std::string unpinned_because() const {
    return slots_.unpinned_because();
  }  // if not empty, copies to and from a GPU are slow

  Metrics metrics() const;                                       // since the engine was made
  const Program& program() const { return running_.program(); }  // the one that runs now

 private:
  Lease acquire(std::size_t unit, Phase phase, bool exact = false);
  void require_unit(std::size_t unit) const;
  void require_acquirable(std::size_t unit, Phase phase) const;
  Lease::Memory memory_of(const Op& use) const;
  void reach_agreement();
  void complete_gradients(std::optional<std::size_t> micro_steps);  // those of the backward passes so far
  void require_not_begun() const;
  void begin();
  void number_step() { scheduler_.run().step = steps() + 1; }
  void require_usable() const;
  void before_write(RunWrite write) const;
  JointRound round_of_change() const;

  std::shared_ptr<const bool> lives_ = std::make_shared<const bool>(true);  // leases see when it expires
  EngineParts parts_;
  RunningProgram running_;
  Slots slots_;
  TrainerStream trainer_;
  LaneArithmetic arithmetic_;
  std::unique_ptr<RecordMirror> mirror_;               // null: records are not mirrored
  std::unique_ptr<const RecordLane> records_;          // null: no tile is on a drive
  std::unique_ptr<CorruptionCheck> corruption_check_;  // null: no update is checked
  std::unique_ptr<const MatrixExecutor> matrices_;     // null: the rule is of elements
  ExchangeTurns exchanges_;                            // exchanges between GPUs
  FirstFailure failure_;
  StepCounters counters_;
  TensorSums tensor_sums_;
  Agreement agreement_;
  std::unique_ptr<SendAhead> ahead_;  // null: exchanges are those of a GPU
  OpExecutor executor_;
  LaneThreads threads_;
  Scheduler scheduler_;
  OffPlan off_plan_;
  CustomUpdate custom_update_;
  HomeMemory homes_;
  Startup startup_;
  StateVisitor state_;
  DeviceOffload offload_;
  std::vector<std::byte> note_;
  JointRound round_{};
  bool has_begun_ = false;
  bool norm_is_known_ = false;  // whether this step's norm is known
};

}  // namespace ballast

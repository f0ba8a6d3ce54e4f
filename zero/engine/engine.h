// Runs a program for one rank's trainer. It composes the parts of this folder, and is all that layers above see of them.
#pragma once

#include "zero/engine/corruption_check.h"
#include "zero/engine/custom_update.h"
#include "zero/engine/device_offload.h"
#include "zero/engine/lease.h"
#include "zero/engine/op_executor.h"
#include "zero/engine/startup.h"
#include "zero/engine/state_visitor.h"

namespace ballast {

// What the engine works with; all of it outlives the engine.
struct EngineParts {
  const Plan& plan;
  Mesh& mesh;
  kernels::Backend& backend;  // the CPU's, called by several lanes at once
  MemoryAccounts& accounts;
  offload::RecordStore* records = nullptr;  // where the program reads and writes tiles
  Timeline* timeline = nullptr;             // where to note what ran when
  std::vector<offload::IoQueue*> queues{};  // of the records' drives
  GpuLanes* gpu = nullptr;                  // whose memory the device tier is; none: the host's
  StreamHandle stream = nullptr;            // the trainer's, on that GPU
  Allocator* allocator = nullptr;           // of the device tier's memory, instead of our own
  std::size_t verify = 0;                   // every so many steps a tile's update: see corruption_check.h
};

// Units are used in any order. A step that leaves the program's order is served on demand, to its end: the same numbers, but
// nothing is done ahead. An order that comes twice in a row is compiled to the program of the steps that follow.
//
// Threads: used by one thread, its rank's trainer; all ranks' use units in the same order. Operations run on the lanes' own
// threads. When anything fails, on any lane, its peers' communicators are aborted and every later call throws the first
// error: state on drives is then that of the last step that was committed.
//
// On a GPU leases are for work in the trainer's stream: their memory is ready when the stream gets there, and released when
// the stream gets to where the lease ended. Only step() waits for the GPU.
class Engine {
 public:
  explicit Engine(const EngineParts& parts);  // reserves every slot; a program that reads tiles needs records
  Engine(Engine&&) = delete;
  ~Engine();  // waits for what is under way, and passes over what failed; in the middle of a step it fails on all ranks

  // One of the two comes first. Optimizer state begins at zero, or as the records have it.
  void initialise(const ParameterSource& source);
  void resume(const ParameterSource& frozen);  // where all trained tiles are in records: the newest committed step

  Lease forward(std::size_t unit) { return acquire(unit, Phase::forward); }
  Lease backward(std::size_t unit) { return acquire(unit, Phase::backward); }

  // With what the next updates are made. Needed before backward where that updates already; step(options) calls it.
  void prepare(const StepOptions& options);

  // Of the gradients that step() would update with, before clipping. All ranks call together, and step() comes next.
  double gradient_norm(double loss_scale = 1.0);
  std::vector<std::vector<double>> tensor_norms(double loss_scale = 1.0);  // the same of each tensor, by unit

  // Returns when the step is decided; its updates may be under way while the next forward begins.
  StepResult step(const StepOptions& options);
  StepResult step();

  void finish();  // waits until everything that was begun is done

  // Between steps, and all ranks together: the device tier's memory is free for others until the return, and nothing else can
  // be called. Parameters that are kept whole may stay; else their addresses change. `agree` is called on each rank, with the
  // error where there is no memory for it, and throws where there is one on any: then nothing has changed.
  void leave_device(bool parameters = true, const Slots::Agree& agree = throw_own);
  void return_to_device(const Slots::Agree& agree = throw_own);

  bool prepared() const { return agreement_.is_prepared(); }
  std::uint64_t steps() const { return agreement_.steps(); }

  // Between steps. What this rank keeps, tile by tile, in host memory; tiles on drives come from there, and go there and are
  // committed as a whole, once `agree` has returned: what it throws leaves them as they were. Parameters that are kept whole
  // have to be changed in the same way on all ranks. All ranks of a run change its state together, and where one fails none
  // changes it: that one throws its own error, the others B3301.
  void look_at_state(
      const TileVisitor& look, const TileFilter& which = [](const LocalTile&) { return true; });
  void change_state(
      const TileVisitor& change, const std::function<void()>& agree = [] {});
  std::vector<LocalTile> own_tiles() const { return state_.tiles(); }  // as they are visited; without their memory
  void continue_from(std::uint64_t steps) { agreement_.set_steps(steps); }
  void parameters_changed();  // whole ones, by their owner, where no other copy of them is updated
  void read_memory(const ConstView& view, std::byte* into) const { homes_.read(view, into); }  // also a GPU's
  View whole_parameters(std::size_t unit) { return homes_.whole_parameters(unit); }  // where they are kept gathered

  std::string unpinned_because() const { return slots_.unpinned_because(); }  // copies to and from a GPU are slow then

  Metrics metrics() const;                                       // since the engine was made
  const Program& program() const { return running_.program(); }  // that it runs by now

 private:
  static void throw_own(const std::exception_ptr& failure);
  Lease acquire(std::size_t unit, Phase phase);
  void require_acquirable(std::size_t unit, Phase phase) const;
  Lease::Memory memory_of(const Op& use) const;
  void reach_agreement();
  void begin();
  void require_usable() const;

  EngineParts parts_;
  RunningProgram running_;
  Slots slots_;
  TrainerStream trainer_;
  LaneArithmetic arithmetic_;
  std::unique_ptr<const RecordLane> records_;          // null: no tile is on a drive
  std::unique_ptr<CorruptionCheck> corruption_check_;  // null: no update is checked
  Sequencer sequencer_;                                // of exchanges between GPUs
  FirstFailure failure_;
  StepCounters counters_;
  Agreement agreement_;
  OpExecutor executor_;
  LaneThreads threads_;
  Scheduler scheduler_;
  OffPlan off_plan_;
  CustomUpdate custom_update_;
  HomeMemory homes_;
  Startup startup_;
  StateVisitor state_;
  DeviceOffload offload_;
  bool has_begun_ = false;
  bool norm_is_known_ = false;  // in this step: no gradients can be added any more
};

}  // namespace ballast

// Runs a program: hands its operations to lanes in the order of the list, and lends memory to the trainer. It knows neither
// stages nor tiers.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>

#include "zero/engine/arithmetic.h"
#include "zero/engine/corruption_check.h"
#include "zero/engine/gpu_lanes.h"
#include "zero/engine/lane_thread.h"
#include "zero/engine/lease.h"
#include "zero/engine/mesh.h"
#include "zero/engine/op_status.h"
#include "zero/engine/record_lane.h"
#include "zero/engine/sequencer.h"
#include "zero/engine/timeline.h"
#include "zero/plan/simulate.h"

namespace ballast {

class RecordMemory;

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

// Writes a range of a tensor's first parameters, in its unit's format. Called for this rank's parts only, except where
// parameters are kept whole.
using ParameterSource = std::function<void(std::size_t unit, std::size_t tensor, Range range, const View& to)>;

// What a rank keeps of a tile between steps: its parameter, master and moments. Of frozen parameters, which are no tiles, a
// stretch at a time: the parameter alone.
struct LocalTile {
  std::size_t unit = 0;
  Range range{};  // of the unit's elements
  kernels::UpdateTile memory{};
  bool frozen = false;
};
using OwnTile = LocalTile;  // its former name, still used outside of this folder
using TileVisitor = std::function<void(const LocalTile& tile)>;
using TileFilter = std::function<bool(const LocalTile& tile)>;  // of tiles without their memory

// Units are used in whatever order. A round that leaves the program's is served on demand, to its end: the same numbers, but
// nothing is done ahead. An order that comes twice in a row is compiled to the program of the rounds that follow.
//
// Used by one thread, its rank's trainer; all ranks' use units in the same order. When anything fails, on any lane, its peers'
// communicators are aborted and every later call throws the first error: state on drives is then that of the last step that
// was committed.
//
// On a GPU leases are for work in the trainer's stream: their memory is ready when the stream gets there, and given back
// when the stream gets to where the lease ended. Only step() waits for the GPU.
class Engine {
 public:
  explicit Engine(const EngineParts& parts);  // reserves every slot; a program that reads tiles needs records
  ~Engine();  // waits for what is under way, and passes over what failed; in the middle of a step it fails on all ranks

  // One of the two comes first. Optimizer state begins at zero, or as the records have it.
  void initialise(const ParameterSource& source);
  void resume(const ParameterSource& frozen);  // where all trained tiles are in records: the newest committed step

  Lease forward(std::size_t unit) { return lend(unit, Phase::forward); }
  Lease backward(std::size_t unit) { return lend(unit, Phase::backward); }

  // With what the next updates are made. Needed before backward where those update already; step(options) calls it.
  void prepare(const StepOptions& options);

  // Of the gradients that step() would update with, before clipping. All ranks ask together, and step() comes next.
  double gradient_norm(double loss_scale = 1.0);
  std::vector<std::vector<double>> tensor_norms(double loss_scale = 1.0);  // the same of each tensor, by unit

  // Returns when the step is decided; its updates may go on while the next forward begins.
  StepResult step(const StepOptions& options);
  StepResult step();

  void finish();  // waits until everything that was begun is done

  // Between steps, and all ranks together: the device tier's memory is free for others until the return, and nothing else can
  // be asked. Parameters that are kept whole may stay; else their addresses change. `agree` is called on each rank, with the
  // error where there is no memory for it, and throws where there is one on any: then nothing has changed.
  void leave_device(bool parameters = true, const Slots::Agree& agree = throw_own);
  void return_to_device(const Slots::Agree& agree = throw_own);

  bool prepared() const { return prepared_; }
  std::uint64_t steps() const { return steps_; }

  // Between steps. What this rank keeps, tile by tile, in host memory; tiles on drives come from there, and go there and are
  // committed as a whole, once `agree` has returned: what it throws leaves them as they were. Parameters that are changed have
  // to be changed on all ranks alike where they are kept whole. All ranks of a run change its state together,
  // and where one fails none changes it: that one throws its own error, the others B3301.
  void look_at_state(
      const TileVisitor& look, const TileFilter& which = [](const LocalTile&) { return true; });
  void change_state(
      const TileVisitor& change, const std::function<void()>& agree = [] {});
  std::vector<LocalTile> own_tiles() const;  // in the order in which they are looked at; without their memory
  void continue_from(std::uint64_t steps) { steps_ = steps; }
  void parameters_changed();  // whole ones, by their owner, where no other copy of them is updated
  void read_memory(const ConstView& view, std::byte* into) const;  // of the training, also a GPU's, into the host's
  View whole_parameters(std::size_t unit);  // where they are kept gathered: all of the unit, as it is laid out

  std::string unpinned_because() const { return slots_.unpinned_because(); }  // copies to and from a GPU are slow then

  Metrics metrics() const;  // since the engine was made
  const Program& program() const { return compiled_ ? *compiled_ : parts_.plan.program(); }  // that it runs by now

 private:
  // What the trainer's stream waited for, between two events in it.
  struct Gap {
    Phase phase;
    Lane lane;
    GpuSpan span;
  };
  // What a rank is about to do where it has left the program's order: uses so far, unit, phase.
  using Place = std::array<std::int64_t, 3>;
  // One walk through a list: the program's, or one after the other of those that take its place.
  struct Round {
    const std::vector<Op>* list = nullptr;
    std::vector<OpStatus> ops{};
    StepNumbers numbers{};
    StepResult result{};
    std::optional<GpuClock> clock{};  // set when the round began
    std::deque<Gap> gaps{};           // not counted yet
    Place place{};                    // of the list that is served on demand
  };
  struct Issued {
    const Op& op;
    OpStatus& status;
    Round& round;
    std::vector<const OpStatus*> after{};
    std::size_t turn = none;  // for what needs one
  };
  struct Counter {
    std::atomic<std::size_t> bytes = 0;
    std::atomic<std::int64_t> nanoseconds = 0;
  };
  struct OpenUse {
    const Op* op;
    Timeline::Time begin;
    std::shared_ptr<GpuSpan> on_gpu;
    offload::Promise promise{};
    bool ended = false;
  };

  // engine.cpp: the trainer's thread.
  Lease lend(std::size_t unit, Phase phase);
  Lease::Memory take();
  void remember(const Trace& chain);
  void begin_use(const Op& op, OpStatus& status);
  void give_back(std::size_t use);
  void come_to_agreement();
  void wait_for_trainer() const;
  void issue_up_to_trainer();
  void issue(const Op& op, OpStatus& status, Round& round);
  const OpStatus& awaited(const Wait& wait, const Round& round) const;
  void begin_round();
  void wait_all(const Round& round) const;
  void require_alive() const;
  void require_prepared(Phase phase) const;
  Round& now() { return rounds_[round_ % rounds_.size()]; }
  Round& last() { return rounds_[(round_ + rounds_.size() - 1) % rounds_.size()]; }
  const std::vector<Op>& list() const { return *rounds_[round_ % rounds_.size()].list; }

  // engine_counts.cpp: any thread.
  void count(const Op& op, Timeline::Time begin, Timeline::Time end);
  void count_exposed(Phase phase, Lane lane, Timeline::Time begin, Timeline::Time end);
  void count_on_gpu(Round& round);
  void wait_exposed(Phase phase, Lane lane, const std::function<void()>& wait);

  // engine_departures.cpp: where the trainer leaves the program's order.
  bool is_next(const Trace& chain) const;
  bool is_at_agreement() const { return next_ < list().size() && list()[next_].kind == OpKind::agree; }
  void serve(const Trace& chain);
  void serve_step();
  void leave_program(const Visit& asked);
  void follow(std::vector<Op> ops, const Visit& asked);
  bool sums_again(const Trace& chain) const;
  void return_to_program();
  Trace repeated_order() const;
  bool change_program(const Trace& trace, bool sums_pass_by);
  std::string text(const Place& place) const;

  // engine_away.cpp
  static void throw_own(const std::exception_ptr& failure);
  void require_between_steps() const;
  bool has_gradients() const;  // that no step has used yet

  // engine_external.cpp
  void require_tiles_in_memory() const;
  std::vector<SummedTile> summed_tiles() const;
  void let_trainer_update();

  // engine_ops.cpp: the lanes' threads.
  const Arithmetic& arithmetic(Lane lane) const { return *arithmetic_[static_cast<std::size_t>(lane)]; }
  void run(const Issued& issued);
  void issue_to_gpu(const Issued& issued, const Stream& stream);
  void run_by_phase(const Op& op, OpStatus& status, Round& round);
  void run_any(const Op& op, OpStatus& status, Round& round);
  void run_in_step(const Op& op, OpStatus& status, Round& round);
  void meet(const Op& op, const Round& round) const;
  void reduce(const Op& op);
  bool is_partial(const Op& op) const;
  void add_squares_by_tensor(const Op& norm, std::span<kernels::ExactSum> squares) const;
  optim::Decision decide(const kernels::ExactSum& squares) const;
  void sum_over_shards(std::span<kernels::ExactSum> squares) const;
  kernels::ExactSum sum_over_model(const kernels::ExactSum& squares) const;
  StepNumbers numbers_of(const optim::Decision& decision) const;
  void agree(const Op& op, Round& round);
  std::string first_wrong_parameter(const std::vector<Op>& list) const;
  [[noreturn]] void fail_op(const Op& op);

  // engine_start.cpp
  void clear_device_memory() const;
  void begin_program();
  void run_entry(bool with_records);
  void load(std::size_t unit, const Range& range, const View& to, const ParameterSource& source) const;
  void fill_home(const Home& home, const ParameterSource& source);
  void fill_record(const Home& home, const ParameterSource& source, RecordMemory& memory);
  void fill_frozen(const Home& home, const ParameterSource& frozen);
  void read_home(const Home& home, RecordMemory& memory);
  void put(const Piece& to, const std::byte* from) const;

  // engine_state.cpp
  Piece parameters_of(const Home& tile) const;
  void keep_parameters(const Home& tile, const std::byte* from);
  LocalTile own_tile(const Home& home, std::byte* parameter, std::byte* state) const;
  std::vector<Home> own_homes() const;
  void visit_frozen(const Home& home, const TileVisitor& visit, bool changes);
  void visit_memory(const Home& home, const TileVisitor& visit, bool changes);
  void visit_record(const Home& home, const TileVisitor& visit, bool changes, RecordMemory& memory);
  void visit_state(const TileVisitor& visit, bool changes, const TileFilter& which);
  void do_together(const std::function<void()>& work);

  EngineParts parts_;
  CompileInput input_;                         // of the program
  std::unique_ptr<const Program> compiled_{};  // in place of the plan's
  Slots slots_;
  std::array<std::optional<Arithmetic>, lane_count> arithmetic_;  // by lane
  std::optional<Stream> stream_;                                  // the trainer's, on a GPU
  std::optional<RecordLane> records_;
  std::optional<CorruptionCheck> corruption_check_;
  const bool updates_in_backward_;

  Round entry_{};
  // This one, the last one, which may go on, and the one before: it is over, but the last one's operations look at it as
  // long as they go on.
  std::array<Round, 3> rounds_;
  std::size_t round_ = 0;
  std::size_t next_ = 0;       // operation to issue
  Trace visited_{};            // in this round
  DepartedRound so_far_{};     // the same, as far as it counts for what is served
  bool departed_ = false;      // in this round
  std::vector<Op> served_{};   // the list that is followed then
  Trace last_departed_{};      // of the round before, if that departed
  std::size_t on_demand_ = 0;  // rounds
  std::vector<optim::Rule> rules_;
  StepOptions options_;  // its groups are rules_
  std::vector<std::uint64_t> begun_at_;
  bool prepared_ = false;
  bool norm_is_known_ = false;  // in this round: no gradients can be added any more
  bool began_ = false;
  bool away_ = false;  // from the device
  std::uint64_t steps_ = 0;
  std::deque<OpenUse> open_uses_;
  std::size_t first_open_use_ = 0;  // its number, counted from the first round on
  Timeline::Time made_ = std::chrono::steady_clock::now();
  TierBytes memory_{};
  std::array<double, phase_count> exposed_{};
  std::array<double, lane_count> stalls_{};
  Metrics at_last_step_{};
  double own_seconds_ = 0.0;  // of the last step
  std::array<Counter, lane_count> counters_;

  Sequencer sequencer_;  // of exchanges between GPUs
  mutable std::mutex error_mutex_;
  std::exception_ptr error_;
  std::array<std::unique_ptr<LaneThread>, lane_count> lanes_;  // the last, so that they end first
};

}  // namespace ballast

// The options of a training, and the plan that they lead to.
#pragma once

#include <ballast/gradient_format.h>
#include <ballast/joint_round.h>
#include <ballast/log.h>
#include <ballast/memory.h>
#include <ballast/model.h>
#include <ballast/optim.h>
#include <ballast/placement.h>
#include <ballast/planner.h>
#include <ballast/schedule.h>
#include <ballast/state_format.h>
#include <ballast/wire.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace ballast {

class Communicator;
class CompiledPlan;   // the library's own
class ExchangeOrder;  // likewise

// The notes of a run that another number of ranks continues, or another stage.
struct EarlierNotes {
  std::vector<std::vector<std::byte>> of_ranks{};  // of the earlier ranks, in order
  // Of each trained tensor of this training, in the order of units: its place among those of the earlier one.
  std::vector<std::size_t> places{};
};

// The steps that a run lost before it began again.
struct LostRun {
  std::string reason{};
  std::uint64_t step = 0;  // the newest one of which any rank had records
};

// The records of a rank on its drives.
struct RecordOptions {
  std::vector<std::filesystem::path> directories{};  // of one or several drives
  // The name of a run that is kept. Without one, the files are temporary, and hold only what is not in memory.
  std::string run{};
  // Each record of the run is written on a drive of a rank of another host too, at every step, so that the run survives the loss
  // of a host with its drives. Hosts mirror each other in pairs, and have as many ranks each. On one host, ranks mirror each
  // other, which survives the loss of a drive. Two ranks that mirror each other have directories of their own.
  bool mirror = false;
  std::string host{};  // of this rank, to choose where it is mirrored; empty: this machine's name
  // Where records of the run are missing or damaged, and no mirror has them: removes what is left and begins the run again; see
  // Training::lost(). Without it, that is an error, and nothing is changed.
  bool begins_again = false;
  // Returns the note with which a rank continues the run of other ranks: see Training::set_note(). It returns or throws the
  // same on all ranks. Without it, rank r gets the note of the earlier rank r, in turns.
  std::function<std::vector<std::byte>(const EarlierNotes& notes)> join_notes{};
  // With other runs: the commit from which this one is resumed, which newest_joint_points() has chosen; {0, 0}: it begins again.
  // Newer ones do not count. Without it, a run that is resumed together with others is refused.
  std::optional<RunPoint> resume_at{};
  // Called by the trainer's thread before records are written, on all ranks. It may wait, or throw the same on all ranks.
  std::function<void(RunWrite)> before_write{};
  std::size_t depth = 16;  // requests at once, of each drive
  bool allow_network = false;
  Log* log = nullptr;  // outlives the records
};

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
  StateFormat format = StateFormat::split;
  GradientFormat gradient_format = GradientFormat::fp32;  // of the reduced gradients of bf16 parameters
  // At most in a tile, which is updated and moved at once; a run keeps those it began with. 0: one tile for what a rank
  // keeps of a unit on the device; elsewhere 256 Ki to 2 Mi.
  std::size_t tile_elements = 0;
  std::size_t micro_steps = 1;
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

// The planner: what a placement needs of a machine, how long a step takes, and the placement whose step is predicted to
// take the least time of those that fit.
#pragma once

#include <ballast/model.h>
#include <ballast/optim.h>
#include <ballast/placement.h>
#include <ballast/schedule.h>
#include <ballast/state_format.h>

#include <array>
#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ballast {

// A machine, real or imagined, as one rank sees it: the bytes that it may use of each tier, and how fast they move.
struct Machine {
  std::array<std::size_t, tier_count> bytes{};  // the bytes of each tier that a program may reserve

  std::size_t ranks_per_host = 0;  // 0: all ranks are on one host

  // Bytes a second.
  double gather = 0;  // inside of a host
  double reduce = 0;
  double across = 0;  // rate of each rank, between hosts
  double upload = 0;
  double shared = 0;  // uploads from host memory that the ranks of a machine share; 0: they share none
  double download = 0;
  double read = 0;  // rate of drives; reads and writes share their time
  double write = 0;
  double device_memory = 0;  // rate of sums there, and of updates that its arithmetic does not limit
  double host_memory = 0;
  double device_updates = std::numeric_limits<double>::infinity();  // rates at which its arithmetic updates state
  double host_updates = std::numeric_limits<double>::infinity();

  double products = 0;  // rate of bf16 matrices on the device: operations a second. 0: products take no time

  // Seconds.
  double collective_latency = 20e-6;
  double commit_latency = 5e-3;

  TransferRates transfer_rates() const { return {upload, download, host_memory, gather, shared}; }

  bool shares_cores = false;    // a CPU: the trainer and all lanes except those of drives compute on the same cores
  bool host_is_device = false;  // a CPU: updates on the host need no copies
  bool one_pool =
      false;  // a CPU, or a GPU that shares its memory: the host's bytes count as the device's, and it is no choice
};

// The time that the trainer computes with a unit.
struct UnitWork {
  double forward_seconds = 0;
  double backward_seconds = 0;
  std::size_t offloaded_bytes = 0;  // activations that leave the device after forward and return for backward
};

// The bytes that a training reserves.
struct LedgerEntry {
  Tier tier = Tier::device;
  std::string owner;  // "gathered", "reduced", "state": the names of slots' roles
  std::size_t bytes = 0;

  bool operator==(const LedgerEntry&) const = default;
};

using Ledger = std::vector<LedgerEntry>;  // listed by tier, the largest owner first

std::size_t bytes_in(const Ledger& ledger, Tier tier);
TierBytes bytes_by_tier(const Ledger& ledger);
std::string to_text(const Ledger& ledger);  // a table

// The predicted times of a step, from one end of the trainer's step to the next.
struct Simulation {
  double seconds = 0;
  std::array<double, phase_count> exposed{};    // time that the trainer waited, for each phase
  std::array<double, lane_count> busy{};        // one for each lane
  std::array<double, lane_count> critical{};    // each lane's part of the critical path
  std::array<std::size_t, lane_count> bytes{};  // bytes moved or processed, for each lane

  Simulation& operator+=(const Simulation& next);  // a step that is made after this one
};

// The question to the planner.
struct ChoiceInput {
  Model model;
  Machine machine;
  std::vector<UnitWork> work;  // one for each unit
  std::size_t ranks = 1;
  std::optional<int> stage{};          // none: it is chosen too
  std::size_t parameter_replicas = 1;  // several need stage 3, and parameters on the device
  StateFormat format = StateFormat::split;
  GradientFormat gradient_format = GradientFormat::fp32;
  optim::StateNames names{};
  std::optional<std::size_t> orthogonalization_steps{};  // steps of a rule of whole matrices; none: a rule of elements
  std::size_t tile_elements = 0;                         // limit of a tile; 0: as TrainingOptions says
  std::size_t micro_steps = 1;
  Schedule schedule{};
  Wire wire{};
  Trace trace{};                    // the uses of each micro-step; empty: the order of declaration
  bool full_records = false;        // records hold parameters too
  bool waits_for_updates = false;   // no step begins before the updates of the last one are done
  Tier activations = Tier::device;  // that the offloaded activations go to. Their bytes are not in the ledger
  // Another training with the same placement, which makes its step after this one: that of another optimizer's parameters. Its
  // memory and its time are added.
  std::shared_ptr<const ChoiceInput> other_optimizer{};
};

struct Choice {
  Placement placement{};
  Ledger ledger{};
  Simulation simulation{};
};

// The bytes that a placement takes of a machine, by tier.
TierBytes needs(const Ledger& ledger, const Machine& machine);

// The placements with every kind of state in one tier, near ones first. The choice may also divide state and parameters among
// tiers.
std::vector<Placement> pure_placements(const ChoiceInput& input);

// The memory of a placement. Cheaper than price(), because nothing is compiled or simulated.
Ledger memory_of(const ChoiceInput& input, const Placement& placement);

// The memory and the time of a placement. Throws if it cannot be compiled.
Choice price(const ChoiceInput& input, const Placement& placement);

bool fits(const Ledger& ledger, const Machine& machine);

// Throws B2004 if nothing fits, with a table of the memory that is missing. Tries no other input, because only the
// caller knows how the machine's bytes depend on it.
Choice choose(const ChoiceInput& input);

}  // namespace ballast

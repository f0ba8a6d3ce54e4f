// Runs whole trainings on threads as ranks, to be compared bit by bit.
#pragma once

#include <functional>
#include <optional>

#include "tests/plan/plan_rig.h"
#include "tests/zero/synthetic.h"
#include "zero/comm/thread_communicator.h"

namespace ballast::testing {

struct Setup {
  Placement placement{};
  std::size_t model_times = 1;  // odd_model()'s
  bool muon = false;            // matrix_model() with Muon, in place of odd_model() with AdamW
  std::size_t tile_elements = 256;
  std::size_t micro_steps = 1;
  Schedule schedule{};
  StateFormat format = StateFormat::split;
  GradientFormat gradient_format = GradientFormat::fp32;
  Wire wire{};
  TransferRates rates = TrainingOptions{}.rates;
  std::size_t ranks_per_host = 1;
  double max_norm = optim::no_clipping;
  double loss_scale = 1.0;
  std::size_t steps = 4;
  Trace trace{};                                   // the uses for which the program is compiled
  std::vector<std::vector<Trace>> uses_by_step{};  // repeated: the uses of each micro-step; empty: all as declared
  std::size_t poisoned_step = none;                // the gradients of this step are not finite on rank 0
  std::optional<int> gpu{};                        // the GPU's number
  std::size_t verify = 0;
  bool offloads = false;  // the training is offloaded after each step and some uses that follow it, then reloaded
  // The memory for gathered parameters changes after each step and some uses that follow it: all, none, all ...
  bool regathers = false;
  bool looks = false;      // the state is visited after each step
  int progress = -1;       // a pipe: rank 0 writes a byte after each step
  bool keeps_run = false;  // `directory` keeps it if all state is on drives; otherwise records end with the training
  bool mirrors = false;    // the run is mirrored; its ranks then have directories of their own
  std::filesystem::path directory{};  // the directory of a run that is kept; empty: a temporary one
};

struct Outcome {
  std::vector<std::vector<std::byte>> seen{};  // what each micro-step saw
  std::vector<double> norms{};
  std::vector<std::size_t> on_demand{};  // one entry for each step: 1 if it was served on demand
  std::vector<std::string> reasons{};
  std::vector<std::byte> parameters{};  // the parameters at the end
  std::size_t verified = 0;
  std::size_t repeated = 0;  // steps
  std::uint64_t steps = 0;
  std::uint64_t began_at = 0;
  std::size_t reserved_bytes = 0;
  std::size_t planned_bytes = 0;
  std::size_t first_planned_bytes = 0;  // the bytes that the program planned at the beginning
  std::array<std::size_t, lane_count> moved_bytes{};
  std::array<std::size_t, lane_count> planned_moves{};
  std::size_t sent_bytes = 0;  // the bytes sent in steps
};

Outcome train_rank(const Setup& setup, Communicator& world);
std::vector<Outcome> train(const Setup& setup);  // all ranks, on threads

// Runs ranks on threads, which learn of another rank's failure only through the training. Returns each rank's error.
std::vector<std::string> failures_of_ranks(std::size_t ranks, const std::function<void(Communicator& world)>& train,
                                           std::chrono::seconds timeout = std::chrono::seconds(30));

void check_same(const std::vector<Outcome>& one, const std::vector<Outcome>& other);
void check_as_planned(
    const std::vector<Outcome>& outcomes);  // the ledger is what is reserved; lanes move what they should

std::vector<Placement> placements(std::size_t ranks);  // all stages on all tiers, and a mixed one

}  // namespace ballast::testing

// Whole trainings on threads as ranks, to be compared bit by bit.
#pragma once

#include "tests/plan/plan_rig.h"
#include "tests/temporary_directory.h"
#include "tests/zero/synthetic.h"
#include "zero/comm/thread_communicator.h"

namespace ballast::testing {

struct Training {
  Model model = odd_model();
  Placement placement{};
  std::size_t tile_elements = 256;
  std::size_t micro_steps = 1;
  Schedule schedule{};
  kernels::StateFormat format = kernels::StateFormat::split;
  double max_norm = optim::no_clipping;
  std::size_t steps = 4;
  std::size_t poisoned_step = none;  // whose gradients are not finite on rank 0
};

struct Outcome {
  std::vector<std::vector<std::byte>> seen{};  // by micro-step
  std::vector<double> norms{};
  std::vector<std::string> reasons{};
  std::vector<std::byte> parameters{};  // at the end
  std::uint64_t steps = 0;
  std::size_t reserved_bytes = 0;
  std::size_t planned_bytes = 0;
  std::array<std::size_t, lane_count> moved_bytes{};
  std::array<std::size_t, lane_count> planned_moves{};
};

// One rank and everything that its engine needs.
class Rank {
 public:
  Rank(const Training& training, Communicator& world, const std::filesystem::path& directory, bool resumes = false);

  Outcome train();
  Engine& engine() { return *engine_; }
  const Plan& plan() const { return plan_; }

 private:
  void take_step(std::size_t step, Outcome& outcome);

  const Training& training_;
  std::size_t rank_;
  Plan plan_;
  std::unique_ptr<kernels::Backend> backend_;
  MemoryAccounts accounts_;
  std::unique_ptr<offload::IoQueue> queue_;
  offload::Drive drive_;
  std::optional<offload::RecordStore> records_;
  Mesh mesh_;
  std::optional<Engine> engine_;
  SyntheticTrainer trainer_;
  std::vector<optim::Rule> rules_;
};

std::vector<Outcome> train(const Training& training);  // of all ranks

}  // namespace ballast::testing

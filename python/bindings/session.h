// A training as Python has it: memory by its address, and callbacks for numbers that torch holds. Keeps the group that it
// trains in, and lets Python's other threads run while it works or waits.
#pragma once

#include <mutex>
#include <optional>
#include <set>

#include "kernels/runtime/log.h"
#include "kernels/state_access.h"
#include "python/bindings/group.h"
#include "zero/state_chunk.h"
#include "zero/training.h"

namespace ballast::python {

// A stretch of memory of the training, which lives as long as this is looked at.
struct Memory {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::optional<int> gpu{};
  py::object owner{};
};

struct SessionOptions {
  int stage = 0;
  Spread parameters{};
  Spread gradients{};
  Spread state{};
  std::vector<std::string> directories{};
  std::string run;
  kernels::StateFormat format = kernels::StateFormat::fp32;
  std::size_t tile_elements = 0;              // 0: the library's own choice
  std::vector<std::size_t> backward_order{};  // of units, which are not lent forward; else in order of declaration
  int threads = 0;
  std::optional<int> gpu{};
  std::uintptr_t stream = 0;
  bool keeps_timeline = false;
  bool update_in_backward = false;
  std::size_t verify = 0;
};

// A tile for a step of the optimizer's own.
struct TileToUpdate {
  std::size_t unit = 0;
  std::size_t first = 0;  // of the unit's elements
  Memory gradients{};     // in fp32, as all other numbers here
  Memory masters{};
};
using OwnStep = std::function<void(const std::vector<TileToUpdate>& tiles, float gradient_factor)>;

struct StepAsked {
  std::vector<optim::Rule> rules{};
  std::vector<std::uint64_t> begun_at{};
  double max_norm = optim::no_clipping;
  double loss_scale = 1.0;
  bool discard = false;
  OwnStep own_step{};  // takes Python's lock itself
};

// What a tile has of one tensor, while the tile is looked at.
struct StatePart {
  std::size_t unit = 0;
  std::size_t tensor = 0;
  std::size_t first = 0;  // of the tensor's elements
  bool frozen = false;    // the parameter alone
  kernels::UpdateTile memory{};
};

class Session {
 public:
  // Writes a range of a tensor's parameters into host memory, in the unit's format; false: they stay as they are.
  using Fill = std::function<bool(std::size_t unit, std::size_t tensor, std::size_t first, std::size_t count,
                                  std::uintptr_t into)>;
  // That of a moment of all of a tensor, in fp32; 0: it stays as it is.
  using MomentAddress = std::function<std::uintptr_t(std::size_t unit, std::size_t tensor, kernels::Moment moment)>;
  using Parts = std::vector<std::pair<std::size_t, std::size_t>>;  // of a tensor's elements: first, count
  using PartLook = std::function<void(const StatePart& part)>;

  // `norm_group` may be None.
  Session(Model model, py::object group, py::object norm_group, std::vector<optim::Rule> rules,
          const SessionOptions& options);

  std::vector<std::pair<Level, std::string>> take_log();  // what was said since the last call
  bool found() const { return training_->found(); }  // a run to go on with: start() asks for frozen parameters only
  void start(const Fill& fill);
  std::uint64_t steps() const { return training_->steps(); }
  std::vector<std::size_t> tensor_begins(std::size_t unit) const;
  Memory full_parameters(std::size_t unit);

  // One unit at a time, until it is given back.
  Memory lend_parameters(std::size_t unit);
  Memory lend_gradients(std::size_t unit);
  void give_back();
  std::string unpinned_because() const { return training_->engine().unpinned_because(); }
  void prepare(const std::vector<optim::Rule>& rules, const std::vector<std::uint64_t>& begun_at);
  double gradient_norm(double loss_scale);
  std::vector<std::vector<double>> tensor_norms(double loss_scale);
  StepResult step(const StepAsked& asked);
  StepResult step_as_prepared();
  void finish();
  using AgreeOnRoom = std::function<void(bool failed)>;  // takes Python's lock itself
  void leave_device(bool parameters, const AgreeOnRoom& agree);
  void return_to_device(const AgreeOnRoom& agree);

  // Between steps. A rank keeps the moments of its parts.
  Parts parts(std::size_t unit, std::size_t tensor) const;
  void read_moment(std::size_t unit, std::size_t tensor, kernels::Moment moment, std::uintptr_t into);
  void write_moments(const MomentAddress& address);
  // Into the state, after their owner has written to these tensors, each a unit and its tensor: their masters begin again.
  void take_full_parameters(const std::set<std::pair<std::size_t, std::size_t>>& written);
  void parameters_changed();  // by their owner, where they are the state's
  void write_parameters(const Fill& fill);
  ChunkKind kind(std::size_t unit) const;    // of its trained tensors
  std::vector<StatePart> own_parts() const;  // in the order in which they are looked at; without their memory
  void look_at_parts(const PartLook& look);
  void change_parts(const PartLook& change, const std::function<void()>& agree);
  void continue_from(std::uint64_t steps);

  std::string ledger(const std::pair<Tier, std::size_t>& own_state) const;
  std::string chrome_trace();

 private:
  template <class Visit>
  void each_part(const LocalTile& tile, Visit&& visit) const;
  std::vector<TileToUpdate> shown(std::span<const SummedTile> tiles) const;
  void each_state_part(const LocalTile& tile, const PartLook& look) const;
  std::size_t rank_in_shard_group() const { return training_->plan().input().rank_in_shard_group; }

  void count_steps() const;  // for what the groups say of this rank

  // Lines wait for Python to take them: threads that say something must not wait for Python's lock.
  std::mutex log_mutex_;
  std::vector<std::pair<Level, std::string>> lines_;
  Log log_{[this](Level level, std::string_view line) {
    const std::lock_guard lock(log_mutex_);
    lines_.emplace_back(level, line);
  }};
  py::object group_;
  py::object norm_group_;
  std::vector<Group*> groups_;  // the same
  std::optional<int> gpu_;
  std::optional<Training> training_;
  std::optional<Lease> lease_;
};

}  // namespace ballast::python

// A Training as Python uses it: memory by its address, and callbacks for values that torch holds. Keeps the groups that
// it trains in, and releases Python's lock while it works or waits. It decides nothing.
#pragma once

#include <ballast/log.h>
#include <ballast/tensor_state.h>

#include <memory>
#include <mutex>
#include <optional>

#include "python/bindings/group.h"

namespace ballast::python {

// Memory of the training. `owner` keeps the training alive.
struct Memory {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::optional<int> gpu{};
  py::object owner{};
};

// Of several trainings of one model.
struct SharedExchanges {
  std::shared_ptr<ExchangeOrder> order = make_exchange_order();
};

// A tile that an optimizer's own step updates.
struct TileToUpdate {
  std::size_t unit = 0;
  std::size_t first = 0;  // of the unit's elements
  Memory gradients{};
  DType gradient_dtype = DType::fp32;
  std::size_t count = 0;      // of elements
  Memory masters{};           // in fp32
  std::vector<Memory> own{};  // values, in fp32
};
using CustomStep = std::function<void(const std::vector<TileToUpdate>& tiles, float gradient_factor, bool is_last)>;

struct StepRequest {
  std::vector<optim::Rule> rules{};
  std::vector<std::uint64_t> missed{};
  double max_norm = optim::no_clipping;
  double loss_scale = 1.0;
  bool discard = false;
  CustomStep custom_step{};  // acquires Python's lock itself
};

class TrainingBinding {
 public:
  // Writes a range of a tensor's parameters to an address in host memory; false: they stay as they are.
  using Fill = std::function<bool(std::size_t unit, std::size_t tensor, std::size_t first, std::size_t count,
                                  std::uintptr_t into)>;
  // The address of a moment of a full tensor, in fp32; 0: it stays as it is.
  using MomentAddress = std::function<std::uintptr_t(std::size_t unit, std::size_t tensor, Moment moment)>;
  using Parts = std::vector<std::pair<std::size_t, std::size_t>>;  // of a tensor's elements: first, count

  // `norm_group` may be None.
  TrainingBinding(Model model, py::object group, py::object norm_group, std::vector<optim::Rule> rules,
                  TrainingOptions options);

  // Calls `work` with the training, which works or waits: one thread at a time, and without Python's lock.
  template <class Work>
  auto working(const Work& work) {
    const OneThread::Working working(thread_);
    return work(*training_);
  }
  Training& training() const { return *training_; }  // any thread may call what only reads

  std::vector<std::pair<Level, std::string>> take_log();  // lines since the last call
  const std::optional<LostRun>& lost() const { return training_->lost(); }
  void start(const Fill& fill);
  void set_note(const std::string& note);
  std::string note() const;
  std::vector<std::size_t> tensor_begins(std::size_t unit) const;
  Memory full_parameters(std::size_t unit);

  // One unit at a time, until it is released.
  Memory acquire_parameters(std::size_t unit);
  Memory acquire_exact_parameters(std::size_t unit);  // even if gathers are encoded
  bool gathers_codes() const;                         // false: acquire_parameters() gathers exact ones
  Memory acquire_gradients(std::size_t unit);
  void release();
  // Calls with the unit, the tensor and a part of its gradients, and acquires Python's lock itself.
  using ShowGradients = std::function<void(std::size_t, std::size_t, Memory gradients, DType dtype)>;
  void visit_gradients(const ShowGradients& visit);
  StepResult step(const StepRequest& request);
  StepResult step_prepared();
  using AgreeOnMemoryInPython = std::function<void(bool failed)>;  // acquires Python's lock itself
  void offload(bool parameters, const AgreeOnMemoryInPython& agree);
  void reload(const AgreeOnMemoryInPython& agree);

  // Between steps: see TensorState. Callbacks acquire Python's lock themselves.
  Parts parts(std::size_t unit, std::size_t tensor) const;
  void read_moment(std::size_t unit, std::size_t tensor, Moment moment, std::uintptr_t into);
  void write_moments(const MomentAddress& address);
  void write_parameters(const Fill& fill);
  void set_steps(std::uint64_t steps);

  std::string ledger(const std::pair<Tier, std::size_t>& own_state) const;
  std::string chrome_trace();

 private:
  Memory acquire(Lease lease);
  TensorState state() const { return TensorState(*training_); }
  std::vector<TileToUpdate> shown(std::span<const SummedTile> tiles) const;
  void count_steps() const;  // for the groups, whose errors name the step of this rank

  // Lines stay here until Python takes them, because threads that log must not wait for Python's lock.
  std::mutex log_mutex_;
  std::vector<std::pair<Level, std::string>> lines_;
  Log log_{[this](Level level, std::string_view line) {
    const std::lock_guard lock(log_mutex_);
    lines_.emplace_back(level, line);
  }};
  OneThread thread_{
      "the training"};  // not of calls that threads of the library make: wait_for_commit(), committed(), parts()
  py::object group_;
  py::object norm_group_;
  std::vector<Group*> groups_;  // both, if there are two
  std::optional<int> gpu_;
  std::unique_ptr<Training> training_;
  std::optional<Lease> lease_;
};

}  // namespace ballast::python

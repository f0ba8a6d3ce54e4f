// Measures an engine's work: bytes and time of each lane, and how long the trainer waited for each.
#pragma once

#include <ballast/planner.h>

#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "zero/engine/step_run.h"
#include "zero/plan/program.h"

namespace ballast {

// Which operation ran when, for the trace viewers of Chrome and Perfetto.
// Each lane adds its entries on its own thread. Read them after Training::finish().
class Timeline {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Limits the entries of each lane; later ones are dropped.
  explicit Timeline(std::size_t most_entries = std::size_t{1} << 20);

  void add(const Op& op, Time begin, Time end);
  void add_wait(Phase phase, Time begin, Time end);  // shows the trainer's wait in the row of the compute lane

  // A row for each lane. A viewer can show several ranks together: each is a process of the trace.
  std::string to_chrome_trace(const Model& model, std::size_t rank) const;

  // The mean time of the trainer's uses of each unit, for simulate().
  std::vector<UnitWork> work(std::size_t units) const;

 private:
  struct Entry {
    std::optional<OpKind> kind;  // none: the trainer waited
    std::size_t unit;
    std::size_t tile;
    Phase phase;
    Time begin;
    Time end;
  };
  void add(Lane lane, const Entry& entry);
  static std::string name_of(const Entry& entry, const Model& model);

  std::size_t most_entries_;
  std::array<std::vector<Entry>, lane_count> lanes_;
  Time start_ = std::chrono::steady_clock::now();
};

// count() and count_bytes() may be called by any lane's thread; everything else by the trainer's.
class StepCounters {
 public:
  // All of it outlives the counters. Without `timeline` nothing is drawn; without `trainer` the trainer works on the
  // host.
  StepCounters(const Placement& placement, Timeline* timeline, const Stream* trainer)
      : placement_(placement), timeline_(timeline), trainer_(trainer) {}

  // Whether the times of a GPU's work are measured. That takes two events for each operation, so only a timeline pays
  // for it.
  bool times_gpu() const { return trainer_ != nullptr && timeline_ != nullptr; }

  void count(const Op& op, Timeline::Time begin, Timeline::Time end);
  void count_bytes(const Op& op);   // where its time is not measured
  void count_on_gpu(StepRun& run);  // the work of its operations on a GPU, as far as it is over
  void count_off_plan_step() { ++off_plan_steps_; }

  // Counts the time of `wait` as a wait of this step, for the lane. On a GPU the trainer's stream waits, not this
  // thread, and is timed for a timeline only.
  void wait(StepRun& run, Phase phase, Lane lane, const std::function<void()>& wait);

  Metrics totals() const;                              // since the engine was made; without what others count
  Metrics end_step(const Metrics& totals);             // the difference to the totals of the last call
  double own_seconds() const { return own_seconds_; }  // seconds of the trainer in the last step, without its waits

 private:
  struct LaneCounter {
    std::atomic<std::size_t> bytes = 0;
    std::atomic<std::int64_t> nanoseconds = 0;
  };
  void count_wait(Phase phase, Lane lane, Timeline::Time begin, Timeline::Time end);

  const Placement& placement_;
  Timeline* timeline_;
  const Stream* trainer_;
  std::array<LaneCounter, lane_count> lanes_;
  Timeline::Time made_ = std::chrono::steady_clock::now();
  std::size_t off_plan_steps_ = 0;
  std::array<double, phase_count> exposed_{};
  std::array<double, lane_count> stalls_{};
  Metrics at_last_step_{};
  double own_seconds_ = 0.0;
};

}  // namespace ballast

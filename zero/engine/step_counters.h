// Measures an engine's work: bytes and time of each lane, and how long the trainer waited for each.
#pragma once

#include <ballast/planner.h>
#include <ballast/step.h>

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/engine/step_run.h"
#include "zero/plan/program.h"
#include "zero/plan/program_cost.h"

namespace ballast {

// Which operation ran when, for the trace viewers of Chrome and Perfetto.
// Each lane adds its entries on its own thread. Read them after Training::finish().
class Timeline {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Limits the entries of each lane; later ones are dropped.
  explicit Timeline(std::size_t most_entries = std::size_t{1} << 20) : most_entries_(most_entries) {}

  void add(const Op& op, Time begin, Time end) {
    add(op.lane, {op.kind, op.unit, op.tile, op.tiles, op.phase, begin, end});
  }

  void add_wait(Phase phase, Time begin, Time end) {  // shows the trainer's wait in the row of the compute lane
    add(Lane::compute, {std::nullopt, none, none, 0, phase, begin, end});
  }

  // A row for each lane. A viewer can show several ranks together: each is a process of the trace.
  std::string to_chrome_trace(const Model& model, std::size_t rank) const {
    std::string text =
        fmt::format(R"([{{"ph":"M","pid":{},"name":"process_name","args":{{"name":"rank {}"}}}})", rank, rank);
    for (std::size_t lane = 0; lane < lane_count; ++lane) {
      if (!lanes_[lane].empty()) text += ",\n" + name_of_row(rank, lane);
      for (const Entry& entry : lanes_[lane]) {
        text += fmt::format(
            ",\n"
            R"({{"ph":"X","pid":{},"tid":{},"cat":{},"name":{},"ts":{:.3f},"dur":{:.3f}}})",
            rank, lane, in_quotes(name(entry.phase)), in_quotes(name_of(entry, model)),
            microseconds(entry.begin - start_), microseconds(entry.end - entry.begin));
      }
    }
    return text + "]\n";
  }

  // The mean time of the trainer's uses of each unit, for simulate().
  std::vector<UnitWork> work(std::size_t units) const {
    std::vector<UnitWork> work(units);
    std::vector<std::array<std::size_t, 2>> uses(units);
    for (const Entry& entry : lanes_[static_cast<std::size_t>(Lane::compute)]) {
      if (entry.kind != OpKind::use) continue;
      const bool forward = entry.phase == Phase::forward;
      double& mean = forward ? work[entry.unit].forward_seconds : work[entry.unit].backward_seconds;
      const double seconds = std::chrono::duration<double>(entry.end - entry.begin).count();
      mean += (seconds - mean) / static_cast<double>(++uses[entry.unit][forward]);
    }
    return work;
  }

 private:
  static std::string name_of_row(std::size_t rank, std::size_t lane) {
    return fmt::format(R"({{"ph":"M","pid":{},"tid":{},"name":"thread_name","args":{{"name":{}}}}})", rank, lane,
                       in_quotes(name(static_cast<Lane>(lane))));
  }

  static double microseconds(std::chrono::steady_clock::duration duration) {
    return std::chrono::duration<double, std::micro>(duration).count();
  }

  static std::string in_quotes(std::string_view text) {
    std::string result = "\"";
    for (const char c : text) {
      const auto code = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        result += {'\\', c};
      } else if (code < 0x20) {
        result += fmt::format("\\u{:04x}", code);
      } else {
        result += c;
      }
    }
    return result + "\"";
  }

  struct Entry {
    std::optional<OpKind> kind;  // none: the trainer waited
    std::size_t unit;
    std::size_t tile;
    std::size_t tiles;
    Phase phase;
    Time begin;
    Time end;
  };

  void add(Lane lane, const Entry& entry) {
    std::vector<Entry>& entries = lanes_[static_cast<std::size_t>(lane)];
    if (entries.size() < most_entries_) entries.push_back(entry);
  }

  static std::string name_of(const Entry& entry, const Model& model) {
    return entry.kind
               ? label({.kind = *entry.kind, .unit = entry.unit, .tile = entry.tile, .tiles = entry.tiles}, model)
               : "wait";
  }

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

  void count(const Op& op, Timeline::Time begin, Timeline::Time end) {
    count_bytes(op);
    lanes_[static_cast<std::size_t>(op.lane)].nanoseconds += (end - begin).count();
    if (timeline_ != nullptr) timeline_->add(op, begin, end);
  }

  void count_bytes(const Op& op) {  // where its time is not measured
    lanes_[static_cast<std::size_t>(op.lane)].bytes += bytes_moved(op, placement_);
  }

  void count_on_gpu(StepRun& run) {  // the work of its operations on a GPU, as far as it is over
    if (!times_gpu()) return;
    for (std::size_t i = 0; i < run.ops.size(); ++i) {
      GpuSpan* const span = run.ops[i].on_gpu.get();
      if (span == nullptr || std::exchange(span->counted, true)) continue;
      count((*run.list)[i], run.clock->time_of(*span->begin), run.clock->time_of(span->end));
    }
    for (; !run.waits.empty() && run.waits.front().span.end.is_done(); run.waits.pop_front()) {
      const StreamWait& wait = run.waits.front();
      count_wait(wait.phase, wait.lane, run.clock->time_of(*wait.span.begin), run.clock->time_of(wait.span.end));
    }
  }

  void count_off_plan_step() { ++off_plan_steps_; }
  void count_repeat(std::chrono::duration<double> time) {
    ++repeats_;
    repeat_seconds_ += time.count();
  }

  // Counts the time of `wait` as a wait of this step, for the lane. On a GPU the trainer's stream waits, not this
  // thread, and is timed for a timeline only.
  void wait(StepRun& run, Phase phase, Lane lane, const std::function<void()>& wait) {
    if (trainer_ != nullptr && !times_gpu()) return wait();
    StreamWait* const in_stream =
        times_gpu() ? &run.waits.emplace_back(StreamWait{phase, lane, GpuSpan(trainer_->gpu(), true)}) : nullptr;
    if (in_stream != nullptr) in_stream->span.mark_begin(*trainer_);
    const auto begin = std::chrono::steady_clock::now();
    wait();
    if (in_stream != nullptr) return in_stream->span.end.record(*trainer_);
    count_wait(phase, lane, begin, std::chrono::steady_clock::now());
  }

  Metrics totals() const {  // since the engine was made; without what others count
    Metrics metrics{.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - made_).count(),
                    .on_demand = off_plan_steps_,
                    .repeated = repeats_,
                    .repeat_seconds = repeat_seconds_,
                    .stalls = stalls_,
                    .exposed = exposed_,
                    .timed = trainer_ == nullptr || times_gpu()};
    for (std::size_t lane = 0; lane < lane_count; ++lane) {
      metrics.bytes[lane] = lanes_[lane].bytes;
      metrics.busy[lane] = static_cast<double>(lanes_[lane].nanoseconds) * 1e-9;
    }
    return metrics;
  }

  Metrics end_step(const Metrics& totals) {  // the difference to the totals of the last call
    const Metrics step = totals.since(std::exchange(at_last_step_, totals));
    own_seconds_ = step.timed ? step.own_seconds() : 0.0;
    return step;
  }

  double own_seconds() const { return own_seconds_; }  // seconds of the trainer in the last step, without its waits

 private:
  struct LaneCounter {
    std::atomic<std::size_t> bytes = 0;
    std::atomic<std::int64_t> nanoseconds = 0;
  };

  void count_wait(Phase phase, Lane lane, Timeline::Time begin, Timeline::Time end) {
    const double seconds = std::chrono::duration<double>(end - begin).count();
    exposed_[static_cast<std::size_t>(phase)] += seconds;
    stalls_[static_cast<std::size_t>(lane)] += seconds;
    if (timeline_ != nullptr) timeline_->add_wait(phase, begin, end);
  }

  const Placement& placement_;
  Timeline* timeline_;
  const Stream* trainer_;
  std::array<LaneCounter, lane_count> lanes_;
  Timeline::Time made_ = std::chrono::steady_clock::now();
  std::size_t off_plan_steps_ = 0;
  std::size_t repeats_ = 0;
  double repeat_seconds_ = 0.0;
  std::array<double, phase_count> exposed_{};
  std::array<double, lane_count> stalls_{};
  Metrics at_last_step_{};
  double own_seconds_ = 0.0;
};

}  // namespace ballast

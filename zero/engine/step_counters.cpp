#include "zero/engine/step_counters.h"

#include <utility>

#include "zero/plan/op_cost.h"

namespace ballast {

void StepCounters::wait(StepRun& run, Phase phase, Lane lane, const std::function<void()>& wait) {
  if (trainer_ != nullptr && !times_gpu()) return wait();
  StreamWait* const in_stream =
      times_gpu() ? &run.waits.emplace_back(StreamWait{phase, lane, GpuSpan(trainer_->gpu(), true)}) : nullptr;
  if (in_stream != nullptr) in_stream->span.mark_begin(*trainer_);
  const auto begin = std::chrono::steady_clock::now();
  wait();
  if (in_stream != nullptr) return in_stream->span.end.record(*trainer_);
  count_wait(phase, lane, begin, std::chrono::steady_clock::now());
}

void StepCounters::count_wait(Phase phase, Lane lane, Timeline::Time begin, Timeline::Time end) {
  const double seconds = std::chrono::duration<double>(end - begin).count();
  exposed_[static_cast<std::size_t>(phase)] += seconds;
  stalls_[static_cast<std::size_t>(lane)] += seconds;
  if (timeline_ != nullptr) timeline_->add_wait(phase, begin, end);
}

void StepCounters::count_on_gpu(StepRun& run) {
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

void StepCounters::count(const Op& op, Timeline::Time begin, Timeline::Time end) {
  count_bytes(op);
  lanes_[static_cast<std::size_t>(op.lane)].nanoseconds += (end - begin).count();
  if (timeline_ != nullptr) timeline_->add(op, begin, end);
}

void StepCounters::count_bytes(const Op& op) {
  lanes_[static_cast<std::size_t>(op.lane)].bytes += bytes_moved(op, placement_);
}

Metrics StepCounters::totals() const {
  Metrics metrics{.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - made_).count(),
                  .on_demand = off_plan_steps_,
                  .stalls = stalls_,
                  .exposed = exposed_,
                  .timed = trainer_ == nullptr || times_gpu()};
  for (std::size_t lane = 0; lane < lane_count; ++lane) {
    metrics.bytes[lane] = lanes_[lane].bytes;
    metrics.busy[lane] = static_cast<double>(lanes_[lane].nanoseconds) * 1e-9;
  }
  return metrics;
}

Metrics StepCounters::end_step(const Metrics& totals) {
  const Metrics step = totals.since(std::exchange(at_last_step_, totals));
  own_seconds_ = step.timed ? step.own_seconds() : 0.0;
  return step;
}

}  // namespace ballast

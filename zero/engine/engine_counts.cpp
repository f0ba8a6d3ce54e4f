// What is counted of an engine's work: how long who waited for whom, and what the lanes moved.
#include <chrono>

#include "zero/engine/engine.h"

namespace ballast {

void Engine::wait_exposed(Phase phase, Lane lane, const std::function<void()>& wait) {
  Gap* gap = stream_ ? &now().gaps.emplace_back(Gap{phase, lane, GpuSpan(stream_->gpu())}) : nullptr;
  if (gap != nullptr) gap->span.begin.record(*stream_);
  const auto begin = std::chrono::steady_clock::now();
  try {
    wait();
  } catch (...) {
    require_alive();  // throws the first error, which may be another
    throw;
  }
  gap != nullptr ? gap->span.end.record(*stream_) : count_exposed(phase, lane, begin, std::chrono::steady_clock::now());
}

void Engine::count_exposed(Phase phase, Lane lane, Timeline::Time begin, Timeline::Time end) {
  const double seconds = std::chrono::duration<double>(end - begin).count();
  exposed_[static_cast<std::size_t>(phase)] += seconds;
  stalls_[static_cast<std::size_t>(lane)] += seconds;
  if (parts_.timeline != nullptr) parts_.timeline->add_wait(phase, begin, end);
}

// What a GPU has done is known when it is over.
void Engine::count_on_gpu(Round& round) {
  if (!stream_) return;
  for (std::size_t i = 0; i < round.ops.size(); ++i) {
    GpuSpan* const span = round.ops[i].on_gpu.get();
    if (span == nullptr || std::exchange(span->counted, true)) continue;
    count((*round.list)[i], round.clock->time_of(span->begin), round.clock->time_of(span->end));
  }
  for (; !round.gaps.empty() && round.gaps.front().span.end.is_done(); round.gaps.pop_front()) {
    const Gap& gap = round.gaps.front();
    count_exposed(gap.phase, gap.lane, round.clock->time_of(gap.span.begin), round.clock->time_of(gap.span.end));
  }
}

void Engine::count(const Op& op, Timeline::Time begin, Timeline::Time end) {
  Counter& counter = counters_[static_cast<std::size_t>(op.lane)];
  counter.bytes += bytes_moved(op, parts_.plan.placement());
  counter.nanoseconds += (end - begin).count();
  if (parts_.timeline != nullptr) parts_.timeline->add(op, begin, end);
}

Metrics Engine::metrics() const {
  Metrics metrics{.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - made_).count(),
                  .on_demand = on_demand_,
                  .verified = corruption_check_ ? corruption_check_->tiles() : 0,
                  .stalls = stalls_,
                  .exposed = exposed_,
                  .memory = memory_};
  for (std::size_t lane = 0; lane < lane_count; ++lane) {
    metrics.bytes[lane] = counters_[lane].bytes;
    metrics.busy[lane] = static_cast<double>(counters_[lane].nanoseconds) * 1e-9;
  }
  return metrics;
}

}  // namespace ballast

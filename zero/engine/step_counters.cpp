#include "zero/engine/step_counters.h"

#include <ballast/step.h>

#include <fmt/format.h>

#include <numeric>
#include <utility>

#include "kernels/runtime/sizes.h"
#include "zero/plan/program_cost.h"

namespace ballast {
namespace {

std::string in_quotes(std::string_view text) {
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

double microseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

std::string name_of_row(std::size_t rank, std::size_t lane) {
  return fmt::format(R"({{"ph":"M","pid":{},"tid":{},"name":"thread_name","args":{{"name":{}}}}})", rank, lane,
                     in_quotes(name(static_cast<Lane>(lane))));
}

}  // namespace

Timeline::Timeline(std::size_t most_entries) : most_entries_(most_entries) {}

void Timeline::add(Lane lane, const Entry& entry) {
  std::vector<Entry>& entries = lanes_[static_cast<std::size_t>(lane)];
  if (entries.size() < most_entries_) entries.push_back(entry);
}

void Timeline::add(const Op& op, Time begin, Time end) {
  add(op.lane, {op.kind, op.unit, op.tile, op.phase, begin, end});
}

void Timeline::add_wait(Phase phase, Time begin, Time end) {
  add(Lane::compute, {std::nullopt, none, none, phase, begin, end});
}

std::string Timeline::name_of(const Entry& entry, const Model& model) {
  return entry.kind ? label({.kind = *entry.kind, .unit = entry.unit, .tile = entry.tile}, model) : "wait";
}

std::string Timeline::to_chrome_trace(const Model& model, std::size_t rank) const {
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

std::vector<UnitWork> Timeline::work(std::size_t units) const {
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

double Metrics::own_seconds() const { return seconds - std::accumulate(exposed.begin(), exposed.end(), 0.0); }

Metrics Metrics::since(const Metrics& before) const {
  Metrics difference = *this;
  difference.seconds -= before.seconds;
  difference.on_demand -= before.on_demand;
  difference.sent_inside -= before.sent_inside;
  difference.sent_across -= before.sent_across;
  for (std::size_t lane = 0; lane < lane_count; ++lane) {
    difference.bytes[lane] -= before.bytes[lane];
    difference.busy[lane] -= before.busy[lane];
    difference.stalls[lane] -= before.stalls[lane];
  }
  for (std::size_t phase = 0; phase < phase_count; ++phase) {
    difference.exposed[phase] -= before.exposed[phase];
  }
  return difference;
}

std::string to_text(const Metrics& metrics) {
  std::string text = fmt::format("{:<10}{:>12}{:>10}{:>12}{:>10}\n", "lane", "bytes", "busy ms", "GB/s", "stalls ms");
  for (std::size_t lane = 0; lane < lane_count; ++lane) {
    const double busy = metrics.busy[lane];
    if (busy == 0.0) continue;
    text += fmt::format("{:<10}{:>12}{:>10.1f}{:>12.2f}{:>10.1f}\n", name(static_cast<Lane>(lane)),
                        human_bytes(metrics.bytes[lane]), busy * 1e3,
                        static_cast<double>(metrics.bytes[lane]) / busy / 1e9, metrics.stalls[lane] * 1e3);
  }
  text += "exposed ";
  for (std::size_t phase = 0; phase < phase_count && metrics.timed; ++phase) {
    text += fmt::format("  {} {:.1f} ms", name(static_cast<Phase>(phase)), metrics.exposed[phase] * 1e3);
  }
  if (!metrics.timed) text += "  not measured: on a GPU, a timeline does it";
  text += fmt::format("\nsent      {} inside the host, {} to other hosts", human_bytes(metrics.sent_inside),
                      human_bytes(metrics.sent_across));
  text += "\nmemory  ";
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    if (metrics.memory[tier] == 0) continue;
    text += fmt::format("  {} {}", name(static_cast<Tier>(tier)), human_bytes(metrics.memory[tier]));
  }
  text += "\n";
  if (metrics.on_demand > 0) {
    text += fmt::format("{} {} served on demand: the trainer left the program's order\n", metrics.on_demand,
                        metrics.on_demand == 1 ? "step was" : "steps were");
  }
  return text;
}

}  // namespace ballast

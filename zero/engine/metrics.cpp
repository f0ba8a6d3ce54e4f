#include <ballast/step.h>

#include <fmt/format.h>

#include <numeric>

#include "kernels/runtime/sizes.h"

namespace ballast {

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

namespace {

std::string memory_text(const Metrics& metrics) {
  std::string text;
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    if (metrics.memory[tier] == 0) continue;
    text += fmt::format("  {} {}", name(static_cast<Tier>(tier)), human_bytes(metrics.memory[tier]));
  }
  return text;
}

}  // namespace

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
  text += "\nmemory  " + memory_text(metrics) + "\n";
  if (metrics.on_demand > 0) {
    text += fmt::format("{} {} served on demand: the trainer left the program's order\n", metrics.on_demand,
                        metrics.on_demand == 1 ? "step was" : "steps were");
  }
  if (metrics.repeated > 0) {
    text += fmt::format("{} {} updates again, after a clipped or skipped one: {:.1f} ms\n", metrics.repeated,
                        metrics.repeated == 1 ? "step made its" : "steps made their", metrics.repeat_seconds * 1e3);
  }
  return text;
}

std::string to_text(const StepResult& result) {
  const Metrics& metrics = result.metrics;
  std::string text = fmt::format("step {}  norm {:.4g}  {:.3f} s", result.step, result.norm, metrics.seconds);
  if (metrics.timed) text += fmt::format("  waits {:.3f} s", metrics.seconds - metrics.own_seconds());
  text += memory_text(metrics);
  if (!result.reason.empty()) text += fmt::format("  {}: {}", result.skipped ? "skipped" : "warning", result.reason);
  return text;
}

std::string to_text(const Straggler& straggler) {
  if (straggler.seconds == 0.0) return "ranks' own times are not measured: on a GPU, a timeline does it";
  return fmt::format("slowest rank {}: {:.1f} ms of its own, the median {:.1f} ms, the least {:.1f} ms",
                     straggler.slowest, straggler.seconds * 1e3, straggler.median * 1e3, straggler.least * 1e3);
}

}  // namespace ballast

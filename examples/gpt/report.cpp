#include "examples/gpt/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "examples/gpt/median.h"
#include "kernels/runtime/sizes.h"

namespace ballast::gpt {
namespace {

double sum(std::span<const double> values) { return std::accumulate(values.begin(), values.end(), 0.0); }

template <typename Amount>
Amount of_drives(const std::array<Amount, lane_count>& by_lane) {
  return by_lane[static_cast<std::size_t>(Lane::disk)] + by_lane[static_cast<std::size_t>(Lane::fetch)];
}

std::string tiers(const TierBytes& bytes) {
  std::string text;
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    if (bytes[tier] == 0) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : "  ", name(static_cast<Tier>(tier)), human_bytes(bytes[tier]));
  }
  return text;
}

// The first step warms up; it counts only if it is the only one.
double typical(std::span<const Step> steps, double Step::*field) {
  std::vector<double> values;
  for (const Step& step : steps.subspan(steps.size() > 1 ? 1 : 0)) {
    values.push_back(step.*field);
  }
  return median(std::move(values));
}

std::string forecast_text(const Forecast& forecast) {
  const Machine& machine = forecast.machine;
  const Simulation& step = forecast.step;
  std::string text =
      fmt::format("\nrates     gather {:.1f}, reduce {:.1f}, copies {:.1f}, updates {:.1f}", machine.gather / 1e9,
                  machine.reduce / 1e9, machine.upload / 1e9, machine.host_memory / 1e9);
  if (machine.read > 0)
    text += fmt::format(", drives {:.1f} to read and {:.1f} to write", machine.read / 1e9, machine.write / 1e9);
  text += fmt::format(" GB/s for each rank\nforecast  a step takes {:.3f} s, including {:.3f} s of waiting",
                      step.seconds, sum(step.exposed));
  if (const std::size_t moved = of_drives(step.bytes); moved > 0) {
    text += fmt::format("; drives move {}", human_bytes(moved));
  }
  return text;
}

std::string needs_text(const RunOptions& options, const Needs& needs) {
  std::string text =
      fmt::format("\nprocess   {} will be resident, including {} for activations and {} for libraries",
                  human_bytes(needs.memory()), human_bytes(needs.activations), human_bytes(needs.libraries));
  if (options.memory.limit) {
    text += fmt::format("; the kernel enforces a limit of {}, libraries included", human_bytes(*options.memory.limit));
  }
  for (const Needs::Drive& drive : needs.drives) {
    text += fmt::format("\ndrive     {}: {} are free; the run takes {} on all drives", drive.directory.string(),
                        human_bytes(drive.available), human_bytes(needs.on_drives));
  }
  return text;
}

// Compares with the drives alone, which were measured with the same bytes to read and to write.
std::string drive_text(const Simulation& forecast, std::span<const Step> steps) {
  const double seconds = typical(steps, &Step::seconds);
  const auto bytes = static_cast<double>(of_drives(steps.back().metrics.bytes));
  const double alone = static_cast<double>(of_drives(forecast.bytes)) / of_drives(forecast.busy);
  return fmt::format("\ndrives    {:.2f} GB in a step, {:.2f} GB/s; {:.2f} GB/s when measured alone", bytes / 1e9,
                     bytes / seconds / 1e9, alone / 1e9);
}

std::string resident_text(const Step& last, const RunOptions& options, const Start& start) {
  const double more = excess(last.resident, start.needs, options.memory) * 100;
  const std::size_t peak = std::max(start.most_resident, last.resident.peak);
  return fmt::format(
      "\nresident  {} at the peak, including {} of libraries' code; without that and the memory at the start, {:.1f} % {} "
      "than announced\n",
      human_bytes(peak), human_bytes(last.resident.of_files), std::abs(more), more < 0 ? "less" : "more");
}

}  // namespace

std::string beginning(const RunOptions& options, const Start& start) {
  const Shape& shape = options.shape;
  const std::size_t micro_steps = options.training.micro_steps;
  std::string text = fmt::format("model     {} layers, width {}, {} heads, context {}, {}: {:.2f} million parameters\n",
                                 shape.layers, shape.width, shape.heads, shape.context, name(shape.dtype),
                                 static_cast<double>(start.parameters) / 1e6);
  text += fmt::format("step      {} ranks x {} micro-steps x {} sequences = {} tokens, from a text of {} bytes\n",
                      start.ranks, micro_steps, options.batch,
                      start.ranks * micro_steps * options.batch * shape.context, start.text_bytes);
  text += fmt::format("matrices  {}", start.library);
  if (start.matrix_rate > 0) {
    text += fmt::format(": {:.0f} GFLOP/s in {} on all ranks", start.matrix_rate / 1e9, name(shape.dtype));
  }
  if (start.forecast) text += forecast_text(*start.forecast);
  text += needs_text(options, start.needs);
  text += fmt::format("\nmemory that this rank will reserve in stage {}, without activations:\n{}",
                      options.training.stage, to_text(start.ledger));
  return text;
}

std::string step_heading() {
  return fmt::format("{:>6} {:>8} {:>9} | {:>9} {:>6} | memory of rank 0\n", "step", "loss", "grad_norm", "tok/s",
                     "mfu");
}

std::string step_line(const Step& step) {
  const std::string mfu = step.mfu > 0 ? fmt::format("{:.1f}%", step.mfu * 100) : "-";
  std::string text =
      fmt::format("{:>6} {:>8.4f} {:>9.4f} | {:>9.0f} {:>6} | {} | exposed {:.0f} ms\n", step.step, step.loss,
                  step.norm, step.tokens_per_second, mfu, tiers(step.bytes), sum(step.metrics.exposed) * 1e3);
  if (!step.skipped.empty()) text += fmt::format("       skipped: {}\n", step.skipped);
  return text;
}

std::string ending(std::span<const Step> steps, const RunOptions& options, const Start& start) {
  if (steps.empty()) return "there are no steps left\n";
  std::string text = fmt::format("median of {} steps: {:.0f} tokens/s", steps.size() > 1 ? steps.size() - 1 : 1,
                                 typical(steps, &Step::tokens_per_second));
  if (start.matrix_rate > 0) {
    text += fmt::format(", forward and backward at {:.0f} % of the matrix rate, mfu {:.1f} %",
                        typical(steps, &Step::matrix_use) * 100, typical(steps, &Step::mfu) * 100);
  }
  if (start.forecast) {
    const double seconds = typical(steps, &Step::seconds);
    text += fmt::format("\na step took {:.3f} s, {:.2f} times the forecast", seconds,
                        seconds / start.forecast->step.seconds);
    if (!start.needs.drives.empty()) text += drive_text(start.forecast->step, steps);
  }
  text += fmt::format("\nheld      {}", tiers(steps.back().bytes));
  if (!options.training.gpu) text += resident_text(steps.back(), options, start);
  return text;
}

std::string json_line(const Step& step, const RunOptions& options, const Start& start) {
  nlohmann::ordered_json line{{"step", step.step},
                              {"loss", step.loss},
                              {"grad_norm", step.norm},
                              {"seconds", step.seconds},
                              {"tokens_per_second", step.tokens_per_second},
                              {"mfu", step.mfu},
                              {"matrix_use", step.matrix_use}};
  for (std::size_t tier = 0; tier < tier_count; ++tier) {
    line["bytes"][std::string(name(static_cast<Tier>(tier)))] = step.bytes[tier];
  }
  constexpr const char* phases[] = {"forward", "backward", "step"};
  for (std::size_t phase = 0; phase < phase_count; ++phase) {
    line["exposed_seconds"][phases[phase]] = step.metrics.exposed[phase];
  }
  for (std::size_t lane = 0; lane < lane_count; ++lane) {
    if (step.metrics.bytes[lane] == 0) continue;
    const std::string of(name(static_cast<Lane>(lane)));
    line["lanes"][of] = {{"bytes", step.metrics.bytes[lane]},
                         {"busy_seconds", step.metrics.busy[lane]},
                         {"waited_for_seconds", step.metrics.stalls[lane]}};
  }
  line["resident"] = {{"peak_bytes", step.resident.peak},
                      {"code_bytes", step.resident.of_files},
                      {"before_bytes", options.memory.before.now - options.memory.before.of_files},
                      {"announced_bytes", start.needs.memory()}};
  line["parameters"] = start.parameters;
  if (const DriveWork& work = start.drive_work; work.record_bytes > 0) {
    line["drive"] = {{"read_bytes", work.read_bytes},
                     {"written_bytes", work.written_bytes},
                     {"record_bytes", work.record_bytes},
                     {"records", work.records}};
  }
  if (start.forecast) {
    line["forecast_seconds"] = start.forecast->step.seconds;
    line["forward_share"] = start.forecast->forward_share;
  }
  if (!step.skipped.empty()) line["skipped"] = step.skipped;
  return line.dump() + "\n";
}

std::string exact_line(const Step& step) { return fmt::format("{} {:a} {:a}\n", step.step, step.loss, step.norm); }

}  // namespace ballast::gpt

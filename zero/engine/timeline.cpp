#include "zero/engine/step_counters.h"

#include <fmt/format.h>

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

}  // namespace ballast

#include "benchmarks/harness/baseline.h"

#include <fmt/format.h>

#include <algorithm>
#include <istream>
#include <nlohmann/json.hpp>

namespace ballast::benchmarks {
namespace {

bool is_header(std::string_view line) {
  const auto json = nlohmann::json::parse(line, nullptr, false);
  return json.is_object() && json.contains("command") && !json.contains("case");
}

bool same_case(const Record& a, const Record& b) {
  return a.suite == b.suite && a.name == b.name && a.against == b.against;
}

const Record* find(std::span<const Record> records, const Record& wanted) {
  const auto found = std::find_if(records.begin(), records.end(),
                                  [&](const Record& record) { return record.ratio && same_case(record, wanted); });
  return found == records.end() ? nullptr : &*found;
}

}  // namespace

std::string baseline_header(std::string_view command, std::string_view date) {
  return nlohmann::ordered_json{{"command", command}, {"date", date}}.dump();
}

Baseline read_baseline(std::istream& in, std::string_view file) {
  Baseline result;
  std::size_t number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (line.empty()) {
      continue;
    }
    if (is_header(line)) {
      const auto json = nlohmann::json::parse(line);
      result.command = json.value("command", "");
      result.date = json.value("date", "");
      continue;
    }
    result.records.push_back(measurement_from_json(line, fmt::format("{}, line {}", file, number)).record);
  }
  return result;
}

std::vector<Finding> compare(std::span<const Record> recorded, std::span<const Record> now, double tolerance) {
  std::vector<Finding> findings;
  for (const auto& was : recorded) {
    if (!was.ratio) {
      continue;
    }
    const Record* is = find(now, was);
    if (is == nullptr) {
      findings.push_back({Finding::Kind::missing, was.name, was.against, *was.ratio});
    } else if (!(*is->ratio >= *was.ratio * (1 - tolerance))) {  // written so that NaN is worse
      findings.push_back({Finding::Kind::worse, was.name, was.against, *was.ratio, *is->ratio});
    }
  }
  for (const auto& is : now) {
    if (is.ratio && find(recorded, is) == nullptr) {
      findings.push_back({Finding::Kind::added, is.name, is.against, 0, *is.ratio});
    }
  }
  return findings;
}

bool any_worse(std::span<const Finding> findings) {
  return std::any_of(findings.begin(), findings.end(),
                     [](const Finding& finding) { return finding.kind == Finding::Kind::worse; });
}

std::string describe(const Finding& finding) {
  std::string what = fmt::format("{} vs. {}", finding.name, finding.against);
  switch (finding.kind) {
    case Finding::Kind::worse:
      return fmt::format("worse    {}: {:.2f}, recorded {:.2f}", what, finding.now, finding.recorded);
    case Finding::Kind::missing:
      return fmt::format("missing  {}: recorded {:.2f}, not measured now", what, finding.recorded);
    case Finding::Kind::added: return fmt::format("new      {}: {:.2f}, not in the record", what, finding.now);
  }
  return what;
}

}  // namespace ballast::benchmarks

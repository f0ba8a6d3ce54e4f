// Recorded runs, and the cases that are worse now. The comparison is one-sided: better cases are not reported.
#pragma once

#include <iosfwd>
#include <span>
#include <string>
#include <vector>

#include "benchmarks/harness/record.h"

namespace ballast::benchmarks {

// A file of lines: {"command": ..., "date": ...} first (files made by --json go without), then one record each.
struct Baseline {
  std::string command{};
  std::string date{};
  std::vector<Record> records{};
};

Baseline read_baseline(std::istream& in, std::string_view file);
std::string baseline_header(std::string_view command, std::string_view date);

struct Finding {
  enum class Kind { worse, missing, added };
  Kind kind;
  std::string name;
  std::string against;
  double recorded = 0;  // ratios; 0 where there is none
  double now = 0;
};

// Compares ratios, not values, because the machine's speed of the day is in both sides of a ratio. Cases belong
// together if suite, case and `against` are equal. A case without a ratio (a limit of the machine) is not judged.
// `tolerance` is the part of the recorded ratio that may be lost.
std::vector<Finding> compare(std::span<const Record> recorded, std::span<const Record> now, double tolerance);

bool any_worse(std::span<const Finding> findings);
std::string describe(const Finding& finding);

}  // namespace ballast::benchmarks

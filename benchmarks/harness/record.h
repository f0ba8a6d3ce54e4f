// One measured case, and its line of JSON.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ballast::benchmarks {

// The stored fields of a case, and no others.
struct Record {
  std::string suite{};
  std::string name{};  // "case" in JSON
  double value = 0;
  std::string unit{};
  std::string against{};          // the subject that it ran in turn with; empty for the limits themselves
  std::optional<double> ratio{};  // how many times faster than `against`: above 1 is better, whatever the unit
  std::string machine{};
  std::string commit{};
};

// The message of a suite to the report: a record without machine and commit, and values that only the table shows.
struct Measurement {
  Record record{};
  double against_value = 0;
  double spread = 0;  // of the ratio, relative to it
};

std::string to_json(const Record& record);
std::string to_json(const Measurement& measurement);

// Reads both kinds of line; fields that a line lacks keep their defaults. `place` is named in the error.
Measurement measurement_from_json(std::string_view line, std::string_view place);

}  // namespace ballast::benchmarks

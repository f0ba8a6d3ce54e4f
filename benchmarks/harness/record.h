// One measured case, and how it is written as a line of JSON.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ballast::benchmarks {

// What is kept of a case: these fields and no others.
struct Record {
  std::string suite{};
  std::string name{};  // "case" in JSON
  double value = 0;
  std::string unit{};
  std::string against{};          // what it was measured in turn with; empty for the limits themselves
  std::optional<double> ratio{};  // how many times faster than `against`: above 1 is better, whatever the unit
  std::string machine{};
  std::string commit{};
};

// What a suite hands to the report: a record before the machine and the commit are known, and what only the table
// shows.
struct Measurement {
  Record record{};
  double against_value = 0;
  double spread = 0;  // of the ratio, as a part of it
};

std::string to_json(const Record& record);
std::string to_json(const Measurement& measurement);

// Reads both kinds of line; fields that a line lacks keep their defaults. `place` is named in the error.
Measurement measurement_from_json(std::string_view line, std::string_view place);

}  // namespace ballast::benchmarks

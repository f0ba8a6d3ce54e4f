#include "benchmarks/harness/table.h"

#include <fmt/format.h>

#include <cmath>

namespace ballast::benchmarks {

std::string number(double value) {
  const double size = std::abs(value);
  const int decimals = size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3;
  return fmt::format("{:.{}f}", value, decimals);
}

namespace {

constexpr std::size_t name_width = 34;
constexpr std::size_t against_width = 30;
constexpr std::size_t against_begins = name_width + 18;

// A name that is longer than its column has a line of its own; the row continues below it, in the right columns.
std::string in_column(const std::string& name, std::size_t begin, std::size_t width) {
  return name.size() <= width ? fmt::format("{:<{}}", name, width) : fmt::format("{}\n{:{}}", name, "", begin + width);
}

}  // namespace

std::string row(const Measurement& measurement) {
  const auto& record = measurement.record;
  auto line = fmt::format("  {} {:>6} {:<6}", in_column(record.name, 2, name_width), number(record.value), record.unit);
  if (record.ratio) {
    line +=
        fmt::format("  {} {:>6} {:<6}  {:>5.2f} ±{:.2f}", in_column(record.against, against_begins, against_width),
                    number(measurement.against_value), record.unit, *record.ratio, *record.ratio * measurement.spread);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace ballast::benchmarks

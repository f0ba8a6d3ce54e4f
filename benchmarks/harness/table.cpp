#include "benchmarks/harness/table.h"

#include <fmt/format.h>

#include <cmath>

namespace ballast::benchmarks {

std::string number(double value) {
  const double size = std::abs(value);
  const int decimals = size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3;
  return fmt::format("{:.{}f}", value, decimals);
}

std::string row(const Measurement& measurement) {
  const auto& record = measurement.record;
  auto line = fmt::format("  {:<34} {:>6} {:<6}", record.name, number(record.value), record.unit);
  if (record.ratio) {
    line += fmt::format("  {:<28} {:>6} {:<6}  {:>5.2f} ±{:.2f}", record.against, number(measurement.against_value),
                        record.unit, *record.ratio, *record.ratio * measurement.spread);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace ballast::benchmarks

#include "benchmarks/harness/machine.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>

namespace ballast::benchmarks {

std::string machine_name(const ThisMachine& machine) {
  const auto cpu = machine.cpu.empty() ? "unknown processor" : machine.cpu;
  return fmt::format("{}, {} {}", cpu, machine.cores, machine.cores == 1 ? "core" : "cores");
}

std::string today() { return fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::time(nullptr))); }

}  // namespace ballast::benchmarks

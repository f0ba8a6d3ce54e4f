#include "benchmarks/harness/machine.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>
#include <fstream>
#include <iterator>

#include "benchmarks/harness/threads.h"

namespace ballast::benchmarks {
namespace {

// The value of the first line "key : value"; empty where there is none.
std::string_view value_of(std::string_view cpuinfo, std::string_view key) {
  const auto line = cpuinfo.find(key);
  if (line == std::string_view::npos) {
    return {};
  }
  const auto colon = cpuinfo.find(": ", line);
  const auto end = std::min(cpuinfo.find('\n', line), cpuinfo.size());
  return colon < end ? cpuinfo.substr(colon + 2, end - colon - 2) : std::string_view{};
}

}  // namespace

std::string machine_name(std::string_view cpuinfo, std::size_t cores) {
  auto name = value_of(cpuinfo, "model name");
  if (name.empty()) {
    name = "unknown processor";
  }
  return fmt::format("{}, {} {}", name, cores, cores == 1 ? "core" : "cores");
}

std::string this_machine() {
  std::ifstream in("/proc/cpuinfo");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  return machine_name(text, available_cores());
}

std::string today() { return fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::time(nullptr))); }

}  // namespace ballast::benchmarks

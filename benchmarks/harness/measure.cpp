#include "benchmarks/harness/measure.h"

#include <ballast/error.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <numeric>
#include <string>
#include <string_view>

#include "kernels/runtime/system_files.h"

namespace ballast::benchmarks {
namespace {

double seconds_of(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::vector<Rates> alternate(std::span<const Subject> subjects, Rounds rounds) {
  std::vector<Rates> result(subjects.size());
  for (std::size_t round = 0; round < rounds.warm_up + rounds.count; ++round) {
    for (std::size_t i = 0; i < subjects.size(); ++i) {
      const double seconds = seconds_of(subjects[i].run);
      if (round >= rounds.warm_up) result[i].push_back(subjects[i].work / seconds);
    }
  }
  return result;
}

double median(Rates values) {
  require(!values.empty(), Code::bad_argument, [] {
    return Problem{.what = "cannot compute a median: there are no values", .needed = "at least one value"};
  });
  std::ranges::sort(values);
  return std::midpoint(values[(values.size() - 1) / 2], values[values.size() / 2]);
}

ResidentMemory resident_memory() {
  const std::string status = read_text("/proc/self/status").value_or("");
  const auto bytes = [&](std::string_view key) { return kibibytes_after(status, key).value_or(0); };
  return {.now = bytes("VmRSS:"), .peak = bytes("VmHWM:"), .of_files = bytes("RssFile:")};
}

bool forget_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;  // proc(5): the peak alone
  return file.good();
}

}  // namespace ballast::benchmarks

#include "benchmarks/harness/measure.h"

#include <ballast/error.h>

#include <algorithm>
#include <chrono>
#include <numeric>

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

}  // namespace ballast::benchmarks

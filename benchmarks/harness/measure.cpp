#include "benchmarks/harness/measure.h"

#include <chrono>

namespace ballast::benchmarks {
namespace {

double seconds_of(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::vector<Runs> alternate(std::span<const Subject> subjects, Rounds rounds) {
  std::vector<Runs> result(subjects.size());
  for (std::size_t round = 0; round < rounds.warm_up + rounds.count; ++round) {
    for (std::size_t i = 0; i < subjects.size(); ++i) {
      const double seconds = seconds_of(subjects[i].run);
      result[i].work = subjects[i].work;
      if (round >= rounds.warm_up) {
        result[i].seconds.push_back(seconds);
      }
    }
  }
  return result;
}

}  // namespace ballast::benchmarks

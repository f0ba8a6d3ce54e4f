// Timing. The machine is noisy, so nothing is timed alone: subjects run in turn, A B A B, and each round gives a ratio.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "benchmarks/harness/statistics.h"

namespace ballast::benchmarks {

// A subject to time. `run` owns everything that it needs.
struct Subject {
  double work = 0;  // of one run, in the unit of the rate: gigabytes for GB/s
  std::function<void()> run{};
};

struct Rounds {
  std::size_t warm_up = 2;
  std::size_t count = 15;
};

// Returns the timed rounds of each subject, in the given order.
std::vector<Runs> alternate(std::span<const Subject> subjects, Rounds rounds);

}  // namespace ballast::benchmarks

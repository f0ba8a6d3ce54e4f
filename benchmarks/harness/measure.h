// Timing, and the memory of this process. The machine is noisy, so nothing is timed alone: subjects run in turn, A B A B, and each
// round gives a ratio. report.py computes the medians and the ratios.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace ballast::benchmarks {

// A subject to time. `run` owns everything that it needs.
struct Subject {
  double work = 0;  // the work of one run, in the unit of the rate: gigabytes for GB/s
  std::function<void()> run{};
};

struct Rounds {
  std::size_t warm_up = 2;
  std::size_t count = 15;
};

// The work a second in each timed round of a subject.
using Rates = std::vector<double>;

// Returns the rates of each subject, in the given order.
std::vector<Rates> alternate(std::span<const Subject> subjects, Rounds rounds);

// Returns the middle value, or the mean of the two in the middle.
double median(Rates values);

// The resident memory of this process, as the kernel counts it.
struct ResidentMemory {
  std::size_t now = 0;
  std::size_t peak = 0;      // the peak since the process began, or since forget_peak()
  std::size_t of_files = 0;  // part of the current size: mostly code of libraries, which the kernel can reclaim
};

// Reads the counts of all threads. Any thread may call; concurrent allocations may or may not be included.
ResidentMemory resident_memory();

// Resets the peak to the current size. Returns false if the kernel does not support it.
bool forget_peak();

}  // namespace ballast::benchmarks

// Timing. The machine is noisy, so nothing is timed alone: subjects run in turn, A B A B, and each round gives a ratio.
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

// The timed rounds of a subject.
struct Runs {
  double work = 0;
  std::vector<double> seconds{};
};

// Returns the timed rounds of each subject, in the given order.
std::vector<Runs> alternate(std::span<const Subject> subjects, Rounds rounds);

// Interpolates linearly between the two nearest values. `q` is from 0 to 1.
double quantile(std::span<const double> values, double q);
double median(std::span<const double> values);

// Returns half the distance between the quartiles, relative to the median.
double spread(std::span<const double> values);

std::vector<double> rates(const Runs& runs);

struct Summary {
  double value;          // median rate of the case
  double against_value;  // median rate of the other subject
  double ratio;          // median of the ratios of each round; not the ratio of the medians, which drift apart
  double spread;         // spread of those ratios
};

// Both have the same number of runs: run i of one was measured in turn with run i of the other.
Summary summarise(const Runs& subject, const Runs& against);

}  // namespace ballast::benchmarks

// Statistics of the times of alternating runs. Pure functions: no clock, no threads.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace ballast::benchmarks {

// Interpolates linearly between the two nearest values. `q` is from 0 to 1.
double quantile(std::span<const double> values, double q);
double median(std::span<const double> values);

// Returns half the distance between the quartiles, relative to the median.
double spread(std::span<const double> values);

// `work` is the work of one run, in the unit of the rate (GB for GB/s).
struct Runs {
  double work = 0;
  std::vector<double> seconds{};
};

struct Summary {
  double value;          // median rate of the case
  double against_value;  // median rate of the other subject
  double ratio;          // median of the ratios of each round; not the ratio of the medians, which drift apart
  double spread;         // of those ratios
};

// Both have the same number of runs: run i of one was measured in turn with run i of the other.
Summary summarise(const Runs& subject, const Runs& against);

std::vector<double> rates(const Runs& runs);

}  // namespace ballast::benchmarks

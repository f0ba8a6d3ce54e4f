// What is made of the times of alternating runs. Pure: no clock, no threads.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace ballast::benchmarks {

// Linear between the two nearest values; `q` from 0 to 1.
double quantile(std::span<const double> values, double q);
double median(std::span<const double> values);

// Half the distance between the quartiles, as a part of the median.
double spread(std::span<const double> values);

// `work` is what one run does, in the unit of the rate (GB for GB/s).
struct Runs {
  double work = 0;
  std::vector<double> seconds{};
};

struct Summary {
  double value;          // median rate of the case
  double against_value;  // median rate of what it is compared with
  double ratio;          // median of the ratios of each round; not the ratio of the medians, which drift apart
  double spread;         // of those ratios
};

// Both have the same number of runs: run i of one was measured in turn with run i of the other.
Summary summarise(const Runs& subject, const Runs& against);

std::vector<double> rates(const Runs& runs);

}  // namespace ballast::benchmarks

#include "benchmarks/harness/measure.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

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

double quantile(std::span<const double> values, double q) {
  require(!values.empty() && q >= 0 && q <= 1, Code::bad_argument, [&] {
    return Problem{.what = "cannot compute a quantile: there are no values, or it is outside 0 to 1",
                   .needed = "at least one value and 0 <= q <= 1",
                   .available = fmt::format("{} values, q = {}", values.size(), q)};
  });
  std::vector<double> sorted(values.begin(), values.end());
  std::sort(sorted.begin(), sorted.end());
  const double place = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const auto above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], place - std::floor(place));
}

double median(std::span<const double> values) { return quantile(values, 0.5); }

double spread(std::span<const double> values) {
  return (quantile(values, 0.75) - quantile(values, 0.25)) / (2 * median(values));
}

std::vector<double> rates(const Runs& runs) {
  std::vector<double> result;
  for (const double seconds : runs.seconds) {
    result.push_back(runs.work / seconds);
  }
  return result;
}

Summary summarise(const Runs& subject, const Runs& against) {
  require(subject.seconds.size() == against.seconds.size(), Code::wrong_size, [&] {
    return Problem{.what = "cannot compare a case: it and what it is compared with have different numbers of rounds",
                   .needed = fmt::format("{} rounds", subject.seconds.size()),
                   .available = fmt::format("{} rounds", against.seconds.size())};
  });
  const auto ours = rates(subject);
  const auto theirs = rates(against);
  std::vector<double> ratios;
  for (std::size_t round = 0; round < ours.size(); ++round) {
    ratios.push_back(ours[round] / theirs[round]);
  }
  return {median(ours), median(theirs), median(ratios), spread(ratios)};
}

}  // namespace ballast::benchmarks

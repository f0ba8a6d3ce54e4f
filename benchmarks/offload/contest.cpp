#include "benchmarks/offload/contest.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdio>

#include "benchmarks/harness/record.h"
#include "benchmarks/harness/statistics.h"

namespace ballast::benchmarks {
namespace {

constexpr std::size_t layouts = 4;  // of files; an even number, so that half of them are in each order

double cpu_seconds() {
  struct rusage used {};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

void emit(const Contest& contest, const std::string& suffix, const std::string& unit, const Summary& summary) {
  fmt::print("{}\n", to_json(Measurement{.record = {.suite = "offload",
                                                    .name = contest.name + suffix,
                                                    .value = summary.value,
                                                    .unit = unit,
                                                    .against = contest.theirs.name,
                                                    .ratio = summary.ratio},
                                         .against_value = summary.against_value,
                                         .spread = summary.spread}));
  std::fflush(stdout);
}

}  // namespace

Sample timed(const std::function<void()>& run) {
  const double cpu = cpu_seconds();
  const auto start = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return {took.count(), cpu_seconds() - cpu};
}

void run_contest(const Contest& contest, std::size_t rounds) {
  Runs ours{.work = contest.gigabytes};
  Runs theirs{.work = contest.gigabytes};
  Runs our_cpu{.work = contest.gigabytes};
  Runs their_cpu{.work = contest.gigabytes};
  const std::size_t in_a_row = (rounds + layouts - 1) / layouts + 1;  // one of them to warm up
  for (std::size_t round = 0; round < layouts * in_a_row; ++round) {
    if (contest.renew && round > 0 && round % in_a_row == 0) contest.renew();
    const Sample us = contest.ours.run();
    const Sample them = contest.theirs.run();
    if (round % in_a_row == 0) continue;
    ours.seconds.push_back(us.seconds);
    theirs.seconds.push_back(them.seconds);
    our_cpu.seconds.push_back(us.cpu_seconds);
    their_cpu.seconds.push_back(them.cpu_seconds);
  }
  emit(contest, "", "GB/s", summarise(ours, theirs));
  if (contest.compares_cpu) emit(contest, ", by CPU time", "GB/CPU s", summarise(our_cpu, their_cpu));
}

}  // namespace ballast::benchmarks

// Contenders that say themselves how long they took: programs of others among them, whose start does not count.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace ballast::benchmarks {

struct Sample {
  double seconds = 0;
  double cpu_seconds = 0;
};

struct Contender {
  std::string name;
  std::function<Sample()> run;
};

// What a run of our own takes, in wall-clock time and in processor time of the whole process.
Sample timed(const std::function<void()>& run);

struct Contest {
  std::string name;
  double gigabytes;  // moved by one run of each
  Contender ours;
  Contender theirs;
  bool compares_cpu = false;  // a second line, with what a second of processor time moves
  // Called three times between rounds: where a file happens to lie on the drive makes a tenth of its speed, so files
  // are made anew, and those of the two contenders change places.
  std::function<void()> renew{};
};

// In turn, round by round; a line of JSON, or two, on stdout.
void hold(const Contest& contest, std::size_t rounds);

}  // namespace ballast::benchmarks

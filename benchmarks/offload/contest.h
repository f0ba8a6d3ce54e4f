// Contests between contenders that report their own times. External programs can take part, without their time to
// start.
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

// Returns the wall-clock time of a run, and the processor time of the whole process.
Sample timed(const std::function<void()>& run);

struct Contest {
  std::string name;
  double gigabytes;  // moved by one run of each
  Contender ours;
  Contender theirs;
  bool compares_cpu = false;  // adds a line with the gigabytes that a second of processor time moves
  // Called three times between rounds. The position of a file on the drive changes its speed by up to a tenth, so this
  // makes the files anew, and swaps those of the two contenders.
  std::function<void()> renew{};
};

// Runs both contenders in turn, round by round. Writes one or two lines of JSON to stdout.
void run_contest(const Contest& contest, std::size_t rounds);

}  // namespace ballast::benchmarks

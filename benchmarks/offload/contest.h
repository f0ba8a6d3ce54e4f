// Contests between contenders that report their own times. External programs can take part, without their time to start: fio, which
// measures the limit of a drive, and DeepSpeed's async_io.
#pragma once

#include <filesystem>
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

// fio with the same file, block size and depth, and direct I/O.
struct FioJob {
  std::vector<std::filesystem::path> files;
  std::string direction;  // "read", "write", "rw"
  std::size_t block_bytes = 0;
  std::size_t depth = 0;
  std::size_t bytes = 0;  // bytes of all files together
};

bool has_fio();

// Returns fio's fastest engine for the job on this machine: io_uring with registered buffers and files, libaio, or
// threads.
std::string best_engine(const FioJob& job);

Sample run_fio(const FioJob& job, const std::string& engine);

// DeepSpeed's async_io in its own process, deepspeed_aio.py. `command` starts it, with its options.
Sample run_deepspeed(const std::string& command);

}  // namespace ballast::benchmarks

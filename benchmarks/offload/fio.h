// fio, which measures the limit of a drive: with the same file, block size and depth, and direct I/O.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "benchmarks/offload/contest.h"

namespace ballast::benchmarks {

struct FioJob {
  std::vector<std::filesystem::path> files;
  std::string direction;  // "read", "write", "rw"
  std::size_t block_bytes = 0;
  std::size_t depth = 0;
  std::size_t bytes = 0;  // of all files together
};

bool has_fio();

// Returns fio's fastest engine for the job on this machine: io_uring with registered buffers and files, libaio, or
// threads.
std::string best_engine(const FioJob& job);

Sample run_fio(const FioJob& job, const std::string& engine);

}  // namespace ballast::benchmarks

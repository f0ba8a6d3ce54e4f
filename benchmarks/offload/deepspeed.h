// DeepSpeed's async_io in a process of its own, see deepspeed_aio.py.
#pragma once

#include <filesystem>
#include <string>

#include "benchmarks/offload/contest.h"

namespace ballast::benchmarks {

// A folder for DeepSpeed's files, gone with this.
class TensorFiles {
 public:
  TensorFiles(std::filesystem::path folder, std::size_t tiles, std::size_t tile_bytes);
  ~TensorFiles();

  std::string options() const;

 private:
  std::filesystem::path folder_;
  std::size_t tiles_;
  std::size_t tile_bytes_;
};

Sample run_deepspeed(const std::string& program, const TensorFiles& files);

}  // namespace ballast::benchmarks

// Tiles through the library's queues, as many at once as a queue is deep.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "benchmarks/harness/buffer.h"
#include "offload/io_queue.h"

namespace ballast::benchmarks {

// Files of one size, one in each directory, written once, each with its own queue.
class Stretch {
 public:
  Stretch(const std::vector<std::string>& directories, std::size_t bytes, std::size_t depth);

  std::vector<std::string> files() const;
  std::size_t bytes() const { return file_bytes_ * files_.size(); }

  // `direction` is fio's word: "read", "write", or "rw", in which every second tile is written.
  void move(const std::string& direction, std::size_t tile_bytes);

 private:
  std::size_t file_bytes_;
  std::size_t depth_;
  std::vector<std::unique_ptr<offload::File>> files_;
  std::vector<std::unique_ptr<offload::IoQueue>> queues_;
  Buffer memory_;
};

}  // namespace ballast::benchmarks

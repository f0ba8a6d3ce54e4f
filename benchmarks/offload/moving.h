// Moves tiles through the library's queues, as many at once as the queue is deep.
#pragma once

#include <memory>

#include "benchmarks/harness/buffer.h"
#include "benchmarks/offload/contest.h"
#include "offload/io_queue.h"

namespace ballast::benchmarks {

// Files of one size, one in each directory, written once. Each has its own queue. The destructor removes them.
class Stretch {
 public:
  Stretch(const std::vector<std::filesystem::path>& directories, std::size_t bytes, std::size_t depth);
  ~Stretch();

  std::vector<std::filesystem::path> files() const;
  std::size_t bytes() const { return file_bytes_ * files_.size(); }

  enum class Direction { read, write, both };  // both: every second tile is written
  void move(Direction direction, std::size_t tile_bytes);

 private:
  std::size_t file_bytes_;
  std::size_t depth_;
  std::vector<std::unique_ptr<offload::File>> files_;
  std::vector<std::unique_ptr<offload::IoQueue>> queues_;
  Buffer memory_;
};

}  // namespace ballast::benchmarks

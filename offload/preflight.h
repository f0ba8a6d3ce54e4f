// The properties and speed of a directory, measured before a long run keeps its state there.
#pragma once

#include <string>

#include "offload/io_queue.h"

namespace ballast::offload {

struct DriveReport {
  std::filesystem::path directory;
  std::string file_system;
  bool is_network = false;
  std::uint64_t free_bytes = 0;
  std::string buffered_because{};  // empty: direct I/O works
  std::string queue{};
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
  double both_bytes_per_second = 0;  // read and written at the same time, added up: the speed of an update
};

struct Probe {
  std::size_t bytes = std::size_t{256} << 20;  // written and read in a nameless file
  std::size_t request_bytes = std::size_t{4} << 20;
  FileOptions file{};
};

// Measures for about a second.
DriveReport inspect(const std::filesystem::path& directory, IoQueue& queue, const Probe& probe = {});

}  // namespace ballast::offload

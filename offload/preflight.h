// The properties and speed of a directory, measured before a long run keeps its state there.
#pragma once

#include <optional>
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

// The load of a run on the drive.
struct Load {
  std::uint64_t state_bytes = 0;  // on the drive, both places of each record
  std::uint64_t written_per_step = 0;
  double seconds_per_step = 0;
};

struct Wear {
  double bytes_per_day = 0;
  double days_of_1000_tbw = 0;  // until a drive rated for 1,000 TB written is worn out
};
Wear wear(const Load& load);

// Returns a readable report. With a load it says whether the load fits, how long a step's bytes take, and the wear.
std::string describe(const DriveReport& report, const std::optional<Load>& load = {});

}  // namespace ballast::offload

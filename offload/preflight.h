// What a directory is fit for, asked before a long run trusts it with its state.
#pragma once

#include <optional>
#include <string>

#include "offload/io_queue.h"

namespace ballast::offload {

struct DriveReport {
  std::filesystem::path directory;
  std::string file_system;
  std::uint64_t free_bytes = 0;
  std::string buffered_because{};  // empty: direct I/O works
  std::string queue{};
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
  double both_bytes_per_second = 0;  // read and written at once, added up: what an update can use
};

struct Probe {
  std::size_t bytes = std::size_t{256} << 20;  // written and read, in a file without a name
  std::size_t request_bytes = std::size_t{4} << 20;
  FileOptions file{};
};

// Measures for a second or so.
DriveReport inspect(const std::filesystem::path& directory, IoQueue& queue, const Probe& probe = {});

// What a run does to the drive.
struct Load {
  std::uint64_t state_bytes = 0;  // on the drive, both places
  std::uint64_t written_per_step = 0;
  double seconds_per_step = 0;
};

struct Wear {
  double bytes_per_day = 0;
  double days_of_1000_tbw = 0;  // until a drive rated for 1,000 TB written is worn out
};
Wear wear(const Load& load);

// For people; with a load also whether it fits, how long its bytes take, and what it wears.
std::string describe(const DriveReport& report, const std::optional<Load>& load = {});

}  // namespace ballast::offload

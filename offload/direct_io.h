// Decides whether a file is read and written around the page cache.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

namespace ballast::offload {

// What statx(2) tells of a file: the units of direct I/O in the file and in memory; 0 and 0 if there is none.
struct DirectIoUnits {
  std::size_t in_file = 0;
  std::size_t in_memory = 0;
};

// Returns why a file does not support direct I/O in blocks of block_bytes; empty if it does. Some file systems tell the units,
// since Linux 6.1. Where they do not, `try_block` moves one block and returns the errno, or 0.
std::string direct_io_obstacle(const std::optional<DirectIoUnits>& units, const std::function<int()>& try_block);

// Begins direct I/O on an open file, and returns the same. A new file is empty before and after.
std::string begin_direct_io(int descriptor, bool is_new);

}  // namespace ballast::offload

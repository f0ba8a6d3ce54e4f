#include "offload/direct_io.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

#include "offload/file.h"

namespace ballast::offload {
namespace {

std::optional<DirectIoUnits> told_units(int descriptor) {
  struct statx found {};
  const bool is_told =
      ::statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 && (found.stx_mask & STATX_DIOALIGN) != 0;
  if (!is_told) return {};
  return DirectIoUnits{.in_file = found.stx_dio_offset_align, .in_memory = found.stx_dio_mem_align};
}

// Only EINVAL says something of blocks: all other failures come back where the file is used.
int move_block(int descriptor, bool is_new) {
  struct alignas(block_bytes) Block {
    std::array<std::byte, block_bytes> bytes{};
  } block;
  void* const memory = block.bytes.data();
  const ssize_t moved =
      is_new ? ::pwrite(descriptor, memory, block_bytes, 0) : ::pread(descriptor, memory, block_bytes, 0);
  const int error = moved < 0 ? errno : 0;
  const bool is_changed = is_new && moved > 0;
  return is_changed && ::ftruncate(descriptor, 0) != 0 ? errno : error;
}

}  // namespace

std::string direct_io_obstacle(const std::optional<DirectIoUnits>& units, const std::function<int()>& try_block) {
  if (!units) {
    return try_block() == EINVAL
               ? fmt::format("the drive or its file system refuses direct I/O in blocks of {} bytes", block_bytes)
               : std::string();
  }
  if (units->in_file == 0) return "the file system has no direct I/O on this file";
  if (units->in_file > block_bytes) return fmt::format("direct I/O needs blocks of {} bytes here", units->in_file);
  if (units->in_memory > block_bytes)
    return fmt::format("direct I/O needs memory that begins at a multiple of {} bytes here", units->in_memory);
  return {};
}

std::string begin_direct_io(int descriptor, bool is_new) {
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (::fcntl(descriptor, F_SETFL, flags | O_DIRECT) != 0) {
    return fmt::format("the file system has no direct I/O ({})", std::generic_category().message(errno));
  }
  std::string obstacle = direct_io_obstacle(told_units(descriptor), [&] { return move_block(descriptor, is_new); });
  if (!obstacle.empty()) ::fcntl(descriptor, F_SETFL, flags);
  return obstacle;
}

}  // namespace ballast::offload

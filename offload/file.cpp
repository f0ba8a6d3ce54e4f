#include "offload/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "kernels/runtime/error.h"

namespace ballast::offload {
namespace {

[[noreturn]] void fail_call(std::string_view call, const std::filesystem::path& path, std::uint64_t offset, int error) {
  fail(Code::file_call, {.what = fmt::format("{} failed: {}", call, std::generic_category().message(error)),
                         .where = fmt::format("{}, byte {}", path.string(), offset)});
}

// Moves all bytes, whatever the kernel moves at a time. `move` moves some of those from `done` on.
template <class Move>
void move_all(std::string_view call, const std::filesystem::path& path, std::uint64_t offset, std::size_t bytes,
              Move move) {
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t moved = move(done);
    if (moved > 0) {
      done += static_cast<std::size_t>(moved);
    } else if (moved == 0) {
      fail_call(call, path, offset + done, ENODATA);
    } else if (errno != EINTR) {
      fail_call(call, path, offset + done, errno);
    }
  }
}

}  // namespace

File::File(const std::filesystem::path& path, int flags)
    : path_(path), descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0600)) {
  if (descriptor_ < 0) fail_call("open", path_, 0, errno);
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void File::read(std::uint64_t offset, std::span<std::byte> into) const {
  move_all("pread", path_, offset, into.size(), [&](std::size_t done) {
    return ::pread(descriptor_, into.data() + done, into.size() - done, static_cast<off_t>(offset + done));
  });
}

void File::write(std::uint64_t offset, std::span<const std::byte> from) const {
  move_all("pwrite", path_, offset, from.size(), [&](std::size_t done) {
    return ::pwrite(descriptor_, from.data() + done, from.size() - done, static_cast<off_t>(offset + done));
  });
}

void File::flush() const {
  if (::fdatasync(descriptor_) != 0) fail_call("fdatasync", path_, 0, errno);
}

}  // namespace ballast::offload

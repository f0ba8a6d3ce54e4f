#include "offload/ring_end.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "kernels/runtime/system_limits.h"

namespace ballast::offload {
namespace {

constexpr int report_interval_ms = 30'000;

}  // namespace

bool is_ring(int descriptor) {
  std::error_code unknown;
  return std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", descriptor), unknown) == "anon_inode:[io_uring]";
}

RingEnd::RingEnd() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail_limit("cannot make a pipe for an io_uring", errno);
  read_ = Descriptor(ends[0]);
  write_ = Descriptor(ends[1]);
}

void RingEnd::wait(Log* log) const {
  pollfd closed{read_.get(), 0, 0};
  for (int result = -1; result <= 0;) {
    result = ::poll(&closed, 1, report_interval_ms);
    if (result == 0 && log != nullptr) {
      log->warning("the kernel has not ended an abandoned io_uring: a drive hangs, or a child process holds it");
    }
  }
}

}  // namespace ballast::offload

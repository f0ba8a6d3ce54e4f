#include "offload/ring.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>
#include <system_error>

#include <array>
#include <cerrno>
#include <filesystem>

#include "kernels/runtime/sizes.h"
#include "kernels/runtime/system_resources.h"

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

void log_no_workers(Log* log) {
  if (log == nullptr) return;
  log->write_once(Level::warning, "io_uring's workers",
                  fmt::format("io_uring cannot start a worker thread ({}): the ring's own thread makes blocking calls, "
                              "more slowly",
                              limits_behind(EAGAIN)));
}

void log_given_up(Log* log, const std::string& reason) {
  if (log == nullptr) return;
  log->warning(
      fmt::format("io_uring is given up: {}. One thread reads and writes instead, one request at a time. Look for what "
                  "refuses it: a seccomp filter, too little memory, a descriptor that was closed",
                  reason));
}

void log_unregistered(Log* log, bool has_sparse_tables, int error, std::size_t bytes) {
  if (log == nullptr) return;
  const std::string reason = has_sparse_tables ? fmt::format("{} for {} (ulimit -l)",
                                                             std::generic_category().message(error), human_bytes(bytes))
                                               : "this kernel has no sparse tables of memory";
  log->write_once(Level::info, "registered memory",
                  fmt::format("io_uring works without registered memory, for more CPU time: {}", reason));
}

}  // namespace ballast::offload

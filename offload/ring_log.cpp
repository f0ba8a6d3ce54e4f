#include "offload/ring_log.h"

#include <fmt/format.h>

#include <cerrno>
#include <system_error>

#include "kernels/runtime/sizes.h"
#include "kernels/runtime/system_limits.h"

namespace ballast::offload {

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

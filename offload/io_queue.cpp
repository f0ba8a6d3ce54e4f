#include "offload/io_queue.h"

#include <fmt/format.h>

#include "kernels/runtime/error.h"

namespace ballast::offload {

std::unique_ptr<IoQueue> open_queue(const IoOptions& options) {
  try {
    return uring_queue(options);
  } catch (const ResourceError& reason) {
    if (options.log != nullptr) {
      options.log->write_once(
          Level::warning, "io_uring",
          fmt::format("no io_uring ({}); threads read and write instead, as fast but for more CPU time",
                      reason.problem().available));
    }
    return thread_queue(options);
  }
}

}  // namespace ballast::offload

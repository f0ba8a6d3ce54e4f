#include "offload/io_queue.h"

#include <ballast/error.h>

#include <fmt/format.h>

namespace ballast::offload {

const IoOptions& checked(const IoOptions& options) {
  require(options.depth >= 1 && options.depth <= 4096, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot open a queue of {} requests", options.depth), .needed = "1 to 4096"};
  });
  return options;
}

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

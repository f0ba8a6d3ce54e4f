#include <ballast/error.h>

#include "offload/io_queue.h"

namespace ballast::offload {

std::unique_ptr<IoQueue> uring_queue(const IoOptions&, const RingEntry&) {
  fail(Code::no_io_uring, {.what = "cannot use io_uring: this build of Ballast has none",
                           .available = "liburing was missing when it was built"});
}

}  // namespace ballast::offload

#include "kernels/runtime/error.h"
#include "offload/io_queue.h"

namespace ballast::offload {

std::unique_ptr<IoQueue> uring_queue(const IoOptions& options) { return uring_queue(options, RingEntry{}); }

std::unique_ptr<IoQueue> uring_queue(const IoOptions&, const RingEntry&) {
  fail(Code::no_io_uring, {.what = "this build of Ballast has no io_uring", .available = "liburing was not there"});
}

}  // namespace ballast::offload

#include "kernels/runtime/error.h"
#include "offload/io_queue.h"

namespace ballast::offload {

std::unique_ptr<IoQueue> uring_queue(const IoOptions&) {
  fail(Code::no_io_uring, {.what = "this build of Ballast has no io_uring", .available = "liburing was not there"});
}

}  // namespace ballast::offload

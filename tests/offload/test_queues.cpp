#include "tests/offload/test_queues.h"

#include <ballast/error.h>

#include "tests/offload/faulty_calls.h"

namespace ballast::offload {
namespace {

std::unique_ptr<IoQueue> threads(const IoOptions& options) { return thread_queue(options); }

std::unique_ptr<IoQueue> disturbed(const IoOptions& options) {
  const auto calls = std::make_shared<FaultyCalls>();
  calls->disturb(7);
  return thread_queue(options, [calls](const IoRequest& request) { return (*calls)(request); });
}

}  // namespace

std::vector<QueueKind> queue_kinds() {
  std::vector<QueueKind> kinds{{"threads", threads}, {"threads, disturbed", disturbed}};
  try {
    uring_queue();
    kinds.push_back({"io_uring", [](const IoOptions& options) { return uring_queue(options); }});
  } catch (const ResourceError&) {
    // A container without io_uring: the tests of the threads still run.
  }
  return kinds;
}

}  // namespace ballast::offload

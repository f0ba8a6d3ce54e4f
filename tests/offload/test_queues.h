// All kinds of queue of this machine, and a queue of threads with faults.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "offload/io_queue.h"

namespace ballast::offload {

struct QueueKind {
  std::string name;
  std::unique_ptr<IoQueue> (*make)(const IoOptions& options);
};

// io_uring is missing if the kernel does not allow it. The others are always there.
std::vector<QueueKind> queue_kinds();

}  // namespace ballast::offload

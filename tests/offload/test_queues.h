// Every kind of queue that there is here, the faulty one among them.
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

// io_uring is missing where the kernel gives none; the others never are.
std::vector<QueueKind> queue_kinds();

}  // namespace ballast::offload

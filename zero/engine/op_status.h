// How far an operation has come.
#pragma once

#include <memory>
#include <optional>

#include "offload/completion.h"
#include "offload/record_store.h"
#include "zero/engine/exec_context.h"
#include "zero/engine/gpu_span.h"

namespace ballast {

// What follows `begun` is written before that is done, by who does the operation, and read after it.
struct OpStatus {
  offload::Completion begun{};  // the end on the CPU; on disks requests, on GPUs work in a stream go on after this
  std::optional<offload::PendingRead> read{};
  offload::Completion written{};
  std::shared_ptr<GpuSpan> on_gpu{};

  void wait() const;                               // the calling thread, for the end
  void check_record() const;                       // that a record, if one was read, is what was written
  void wait_in(const ExecContext& context) const;  // what is done there later begins after the end
};

}  // namespace ballast

// The progress of an operation.
#pragma once

#include <memory>
#include <optional>

#include "offload/completion.h"
#include "offload/record_store.h"
#include "zero/engine/exec_context.h"
#include "zero/engine/gpu_span.h"

namespace ballast {

// The operation's lane writes the members after `is_free` before `begun` is done. Other threads read them after that.
struct OpStatus {
  offload::Completion begun{};  // the end on the CPU; requests to a drive, and work in a stream, end later
  bool is_awaited = false;      // in the list; otherwise its end in a stream need not be marked
  bool is_free = true;          // of the trainer: see freed_ops.h; the trainer's thread alone uses it
  bool in_stream = false;
  std::optional<offload::PendingRead> read{};
  mutable bool is_checked = false;  // the record that is read
  offload::Completion written{};
  std::shared_ptr<GpuSpan> on_gpu{};  // null: its end is not marked

  bool has_succeeded() const;  // on the host; false before the end, and after a failure
  void wait() const;           // blocks the calling thread until the end, if that is marked
  void wait_on_host() const;   // also returns before the end of work in a stream
  // Waits until the operation has read its record, if it reads one. The first call also verifies the record's checksum, and
  // throws B3202.
  void check_record() const;
  // The same, by the trainer, before the operations that use the record are issued: it is about to change the record, so those
  // do not check it again.
  void accept_record();
  void wait_in(const ExecContext& context) const;  // later work there begins after the end
};

}  // namespace ballast

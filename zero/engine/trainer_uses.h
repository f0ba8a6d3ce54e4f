// The trainer's uses of units that have begun and are not over.
#pragma once

#include <deque>
#include <optional>

#include "zero/engine/exec_context.h"
#include "zero/engine/gpu_lanes.h"
#include "zero/engine/step_counters.h"

namespace ballast {

// The trainer's place of work: the host, or its stream on a GPU.
class TrainerStream {
 public:
  TrainerStream(kernels::Backend& cpu, const GpuLanes* gpu, StreamHandle handle) : cpu_(cpu) {
    if (gpu != nullptr) stream_.emplace(Stream::wrap(handle, gpu->gpu()));
  }
  TrainerStream(TrainerStream&&) = delete;

  const Stream* stream() const { return stream_ ? &*stream_ : nullptr; }  // null on the host
  ExecContext context() const { return stream_ ? ExecContext(cpu_, *stream_) : ExecContext(cpu_); }

  // Work that the trainer issued after its leases may read or write full parameters that are kept. Nothing else may
  // write or read them before that work is done.
  void synchronize() const {
    if (stream_) stream_->synchronize();
  }

 private:
  kernels::Backend& cpu_;
  std::optional<Stream> stream_;
};

// Used by the trainer's thread. Uses are done in the order in which they began: an operation that waits for one may
// rely on those before it.
class TrainerUses {
 public:
  TrainerUses(const TrainerStream& trainer, StepCounters& counters) : trainer_(trainer), counters_(counters) {}

  void begin(const Op& op, OpStatus& status);  // the status is done when the use is
  void end(std::size_t number);                // ends the use that had this next_number()
  void abandon() { open_.clear(); }            // operations that wait for them fail

  const Op& op(std::size_t number) const { return *open_[number - first_].op; }
  std::size_t next_number() const { return first_ + open_.size(); }
  const Op* oldest() const { return open_.empty() ? nullptr : open_.front().op; }  // null: none is open

 private:
  struct Use {
    const Op* op;
    OpStatus* status;
    Timeline::Time begin;
    std::shared_ptr<GpuSpan> on_gpu;
    offload::Promise promise{};
    bool ended = false;
  };

  const TrainerStream& trainer_;
  StepCounters& counters_;
  std::deque<Use> open_;
  std::size_t first_ = 0;  // number of the oldest, counted from the first step on
};

}  // namespace ballast

// The trainer's place of work: the host, or its stream on a GPU.
#pragma once

#include <optional>

#include "zero/engine/exec_context.h"
#include "zero/engine/gpu_lanes.h"

namespace ballast {

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

}  // namespace ballast

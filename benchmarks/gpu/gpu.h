// The GPU that the cases run on, and its memory. Subjects issue their work several times and then wait for it, so that the wait
// is a small part of what is timed.
#pragma once

#include <functional>
#include <memory>

#include "benchmarks/harness/measure.h"
#include "kernels/backend.h"
#include "kernels/runtime/buffer.h"
#include "kernels/runtime/stream.h"

namespace ballast::benchmarks {

class TestedGpu {
 public:
  explicit TestedGpu(int gpu);  // throws B2101 or B2102 without a GPU

  kernels::Backend& backend() { return *backend_; }
  const Stream& stream() const { return stream_; }

  // Memory with plausible values: small ones, of one sign.
  std::shared_ptr<Buffer> device(std::size_t bytes);
  std::shared_ptr<Buffer> host(MemoryKind kind, std::size_t bytes);

  // A subject whose `issue` moves `bytes`, read and written together.
  Subject moving(std::size_t bytes, std::function<void()> issue) const;

 private:
  std::shared_ptr<Buffer> memory(MemoryKind kind, std::size_t bytes);

  int gpu_;
  MemoryAccounts accounts_;
  Stream stream_;
  std::unique_ptr<kernels::Backend> backend_;
};

}  // namespace ballast::benchmarks

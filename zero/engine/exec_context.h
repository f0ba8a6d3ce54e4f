// The place of work: the CPU, where it is over when a call returns, or a GPU, where it is done in the order of a
// stream.
#pragma once

#include <cstring>

#include "kernels/backend.h"
#include "kernels/runtime/stream.h"

namespace ballast {

// A view: backend and stream outlive it.
class ExecContext {
 public:
  explicit ExecContext(kernels::Backend& cpu) : backend_(&cpu) {}
  ExecContext(kernels::Backend& gpu, const Stream& stream) : backend_(&gpu), stream_(&stream) {}

  kernels::Backend& backend() const { return *backend_; }
  const Stream* stream() const { return stream_; }  // null on the CPU

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
    stream_ != nullptr ? ballast::copy(to, from, bytes, *stream_) : void(std::memcpy(to, from, bytes));
  }
  void zero(std::byte* memory, std::size_t bytes) const {
    stream_ != nullptr ? ballast::fill(memory, 0, bytes, *stream_) : void(std::memset(memory, 0, bytes));
  }
  void finish() const {
    if (stream_ != nullptr) stream_->synchronize();
  }

 private:
  kernels::Backend* backend_;
  const Stream* stream_ = nullptr;
};

}  // namespace ballast

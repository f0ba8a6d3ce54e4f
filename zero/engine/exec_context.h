// The place of work: the CPU, where it is over when a call returns, or a GPU, where it is done in the order of a stream;
// and marks in that order.
#pragma once

#include <chrono>
#include <cstring>
#include <optional>

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

// The marks at which work began and ended on a GPU.
struct GpuSpan {
  // timed: with the times of both marks, for a timeline. Otherwise there is only the end, for what waits for it.
  GpuSpan(int gpu, bool timed) : end(gpu, timed ? Event::Timing::on : Event::Timing::off) {
    if (timed) begin.emplace(gpu, Event::Timing::on);
  }
  void mark_begin(const Stream& stream) const {
    if (begin) begin->record(stream);
  }

  std::optional<Event> begin{};
  Event end;
  bool counted = false;
};

// Translates events to the host's clock. Events only tell the time between two of them, to a ten-millionth of it.
class GpuClock {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit GpuClock(int gpu) : idle_(gpu), set_(gpu, Event::Timing::on) { set(); }

  void set() {  // again, before the events that come next are recorded
    set_.record(idle_);
    set_.synchronize();
    set_at_ = std::chrono::steady_clock::now();
  }
  Time time_of(const Event& later) const {
    const std::chrono::duration<double> since(later.seconds_since(set_));
    return set_at_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(since);
  }

 private:
  Stream idle_;  // so that setting it waits for nothing
  Event set_;
  Time set_at_{};
};

}  // namespace ballast

// The marks at which work began and ended on a GPU.
#pragma once

#include <chrono>
#include <optional>

#include "kernels/runtime/stream.h"

namespace ballast {

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

// The order of exchanges between GPUs, on the GPU itself.
#pragma once

#include <memory>

#include "zero/engine/gpu_span.h"

namespace ballast {

// Exchanges of different groups of ranks are in different streams. Each waits for the one before it, because a GPU may be
// unable to run both at once: ranks that run them in different orders would wait for each other for ever. Used by one
// thread at a time, in the order of the sequencer's tickets.
class ExchangeOrder {
 public:
  explicit ExchangeOrder(std::size_t ranks) : is_needed_(ranks > 1) {}

  void wait_in(const Stream& stream) const {
    if (end_ != nullptr && last_ != stream.handle()) stream.wait_for(*end_);
  }

  // After an exchange was issued. `span` is null if nothing else needs its end.
  void end_in(const Stream& stream, const std::shared_ptr<GpuSpan>& span) {
    if (!is_needed_) return;
    last_ = stream.handle();
    if (span != nullptr) {
      end_ = {span, &span->end};
      return;
    }
    if (own_ == nullptr) own_ = std::make_shared<Event>(stream.gpu());
    own_->record(stream);
    end_ = own_;
  }

 private:
  bool is_needed_;
  StreamHandle last_ = nullptr;
  std::shared_ptr<const Event> end_;
  std::shared_ptr<Event> own_;  // for exchanges whose end is not marked
};

}  // namespace ballast

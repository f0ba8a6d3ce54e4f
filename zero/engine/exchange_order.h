// The order of exchanges between GPUs, on the host and on the GPU itself.
#pragma once

#include <memory>

#include "zero/engine/gpu_span.h"

namespace ballast {

// Exchanges of different groups of ranks are in different streams. Each waits for the one before it, because a GPU may be
// unable to run both at once: ranks that run them in different orders would wait for each other for ever. Trainings may share
// the order.
class ExchangeOrder {
 public:
  Sequencer& turns() { return turns_; }

  // The thread whose turn it is calls both.
  void wait_in(const Stream& stream) const {
    if (end_ != nullptr && last_ != stream.handle()) stream.wait_for(*end_);
  }

  // After an exchange was issued. `span` is null if nothing else needs its end.
  void end_in(const Stream& stream, const std::shared_ptr<GpuSpan>& span) {
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
  Sequencer turns_;
  StreamHandle last_ = nullptr;
  std::shared_ptr<const Event> end_;
  std::shared_ptr<Event> own_;  // for exchanges whose end is not marked
};

// The exchanges of one training, in an order that it may share.
class ExchangeTurns {
 public:
  // Null: an order of its own.
  ExchangeTurns(std::shared_ptr<ExchangeOrder> order, std::size_t ranks)
      : order_(order != nullptr ? std::move(order) : std::make_shared<ExchangeOrder>()), are_marked_(ranks > 1) {}
  ExchangeTurns(ExchangeTurns&&) = delete;
  ~ExchangeTurns() { cancel(); }

  // The trainer's thread, in the order that is wanted. `turn` is that of an operation.
  void add(Sequencer::Turn turn) { order_->turns().add(party_, turn); }
  // Any thread: ends all waits, because an exchange will never begin.
  void cancel() { order_->turns().cancel(party_); }

  // The turn of an exchange that is issued into a stream, until this ends.
  class Current {
   public:
    Current(ExchangeTurns& turns, Sequencer::Turn turn, const Stream& stream)
        : turns_(turns.order_->turns().await(turns.party_, turn) ? &turns : nullptr), stream_(stream) {
      if (turns_ != nullptr) turns_->order_->wait_in(stream_);
    }
    Current(Current&&) = delete;
    ~Current() {
      if (turns_ != nullptr) turns_->order_->turns().done();
    }
    void issued(const std::shared_ptr<GpuSpan>& span) {
      if (turns_ != nullptr && turns_->are_marked_) turns_->order_->end_in(stream_, span);
    }

   private:
    ExchangeTurns* turns_;  // null after cancel()
    const Stream& stream_;
  };

 private:
  std::shared_ptr<ExchangeOrder> order_;
  bool are_marked_;
  Sequencer::Party party_;
};

}  // namespace ballast

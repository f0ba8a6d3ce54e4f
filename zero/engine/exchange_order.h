// The order of exchanges between GPUs, on the host and on the GPU itself.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "zero/engine/exec_context.h"

namespace ballast {

// Makes threads act one after the other, in the order in which their turns were added. Several parties may share it. Each
// cancels its own turns only.
class Sequencer {
 public:
  class Party {
   private:
    friend Sequencer;
    bool is_cancelled_ = false;  // guarded by the sequencer's mutex
  };
  using Turn = const void*;  // names one; no two that are not over have the same name

  void add(const Party& party, Turn turn) {
    {
      const std::lock_guard lock(mutex_);
      if (!party.is_cancelled_) turns_.push_back({&party, turn});
    }
    changed_.notify_all();
  }

  // Any thread: returns when all turns before this one are over, also if it has not been added yet. Returns false after cancel().
  bool await(const Party& party, Turn turn) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return party.is_cancelled_ || (!turns_.empty() && turns_.front().turn == turn); });
    if (party.is_cancelled_) return false;
    turns_.front().has_begun = true;
    return true;
  }

  // The thread whose turn was awaited.
  void done() {
    {
      const std::lock_guard lock(mutex_);
      turns_.pop_front();
    }
    changed_.notify_all();
  }

  // Any thread: ends the party's waits, because one of its turns will never come. A turn that has begun ends with done().
  void cancel(Party& party) {
    {
      const std::lock_guard lock(mutex_);
      party.is_cancelled_ = true;
      std::erase_if(turns_, [&](const Added& each) { return each.party == &party && !each.has_begun; });
    }
    changed_.notify_all();
  }

 private:
  struct Added {
    const Party* party;
    Turn turn;
    bool has_begun = false;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Added> turns_;
};

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

  // Called when an exchange was issued. `span` is null if nothing else needs its end.
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
  std::shared_ptr<Event> own_;  // the end of exchanges whose end is not marked
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

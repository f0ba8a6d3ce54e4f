// Ranks whose gathers wait for the test: each one, in any group, until the test releases it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>

#include "tests/zero/forwarding_communicator.h"

namespace ballast::testing {

// Counts the gathers that may run. Any thread may call it.
class Gate {
 public:
  void hold() {
    const std::lock_guard lock(mutex_);
    allowed_ = passed_;
    holds_ = true;
  }
  void release(std::size_t gathers) {
    const std::lock_guard lock(mutex_);
    allowed_ += gathers;
    changed_.notify_all();
  }
  void open() {
    const std::lock_guard lock(mutex_);
    holds_ = false;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    const std::size_t mine = passed_++;
    const bool may_run = changed_.wait_for(lock, std::chrono::minutes(1), [&] { return !holds_ || mine < allowed_; });
    if (!may_run) throw std::runtime_error("a gather was held for a minute: another one was released");
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t passed_ = 0;
  std::size_t allowed_ = 0;
  bool holds_ = false;
};

// Holds gathers as long as it lives.
class Holding {
 public:
  explicit Holding(Gate& gate) : gate_(gate) { gate.hold(); }
  Holding(const Holding&) = delete;
  ~Holding() { gate_.open(); }

 private:
  Gate& gate_;
};

class HeldGathers final : public ForwardingCommunicator {
 public:
  HeldGathers(Communicator& inner, Gate& gate) : ForwardingCommunicator(inner), gate_(gate) {}

  using ForwardingCommunicator::all_gather;
  void all_gather(ConstView mine, View all) override {
    gate_.pass();
    ForwardingCommunicator::all_gather(mine, all);
  }
  using ForwardingCommunicator::split;
  std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel) override {
    return std::unique_ptr<Communicator>(new HeldGathers(part(color, channel), gate_));
  }

 private:
  HeldGathers(std::unique_ptr<Communicator> owned, Gate& gate)
      : ForwardingCommunicator(std::move(owned)), gate_(gate) {}

  Gate& gate_;
};

}  // namespace ballast::testing

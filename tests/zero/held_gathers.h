// Ranks whose gathers wait for the test: each one, in any group, until the test releases it.
#pragma once

#include <ballast/comm.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

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

class HeldGathers final : public Communicator {
 public:
  HeldGathers(Communicator& inner, Gate& gate) : inner_(inner), gate_(gate) {}

  std::size_t rank() const override { return inner_.rank(); }
  std::size_t size() const override { return inner_.size(); }
  Allocator* shared_memory() override { return inner_.shared_memory(); }
  void all_gather(ConstView mine, View all) override {
    gate_.pass();
    inner_.all_gather(mine, all);
  }
  void reduce_scatter(ConstView all, View into) override { inner_.reduce_scatter(all, into); }
  void all_reduce(ConstView all, View into) override { inner_.all_reduce(all, into); }
  void all_reduce(std::span<std::int64_t> values, Purpose purpose) override { inner_.all_reduce(values, purpose); }
  void broadcast(View values, std::size_t root) override { inner_.broadcast(values, root); }
  void barrier() override { inner_.barrier(); }
  std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel) override {
    return std::unique_ptr<Communicator>(new HeldGathers(inner_.split(color, channel), gate_));
  }
  void abort(std::string_view reason) override { inner_.abort(reason); }
  void leave(const LeaveReason& leave_reason) override { inner_.leave(leave_reason); }
  void set_activity(std::string_view activity) override { inner_.set_activity(activity); }

 private:
  HeldGathers(std::unique_ptr<Communicator> owned, Gate& gate)
      : owned_(std::move(owned)), inner_(*owned_), gate_(gate) {}

  std::unique_ptr<Communicator> owned_{};
  Communicator& inner_;
  Gate& gate_;
};

}  // namespace ballast::testing

// Counts the agreements of a group and of all groups that are split from it.
#pragma once

#include <atomic>

#include "tests/zero/forwarding_communicator.h"

namespace ballast::testing {

class CountingCommunicator final : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

  std::size_t agreements() const { return *count_; }  // sums of integers so far

  using ForwardingCommunicator::all_reduce;
  void all_reduce(std::span<std::int64_t> values, Purpose purpose) override {
    ++*count_;
    ForwardingCommunicator::all_reduce(values, purpose);
  }
  using ForwardingCommunicator::split;
  std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel) override {
    return std::unique_ptr<Communicator>(new CountingCommunicator(part(color, channel), count_));
  }

 private:
  CountingCommunicator(std::unique_ptr<Communicator> owned, std::shared_ptr<std::atomic<std::size_t>> count)
      : ForwardingCommunicator(std::move(owned)), count_(std::move(count)) {}

  std::shared_ptr<std::atomic<std::size_t>> count_ = std::make_shared<std::atomic<std::size_t>>(0);
};

}  // namespace ballast::testing

// Counts the agreements of a group and of all groups that are split from it.
#pragma once

#include <ballast/comm.h>

#include <atomic>
#include <utility>

namespace ballast::testing {

class CountingCommunicator final : public Communicator {
 public:
  explicit CountingCommunicator(Communicator& inner) : inner_(inner) {}

  std::size_t agreements() const { return *count_; }  // sums of integers so far

  std::size_t rank() const override { return inner_.rank(); }
  std::size_t size() const override { return inner_.size(); }
  Allocator* shared_memory() override { return inner_.shared_memory(); }
  void all_gather(ConstView mine, View all) override { inner_.all_gather(mine, all); }
  void reduce_scatter(ConstView all, View into) override { inner_.reduce_scatter(all, into); }
  void all_reduce(ConstView all, View into) override { inner_.all_reduce(all, into); }
  void all_gather(ConstView mine, View all, const Encoding& encoding) override {
    inner_.all_gather(mine, all, encoding);
  }
  void reduce_scatter(ConstView all, View into, const Encoding& encoding) override {
    inner_.reduce_scatter(all, into, encoding);
  }
  void all_reduce(ConstView all, View into, const Encoding& encoding) override {
    inner_.all_reduce(all, into, encoding);
  }
  std::size_t ranks_per_host() const override { return inner_.ranks_per_host(); }
  SentBytes sent() const override { return inner_.sent(); }
  void all_reduce(std::span<std::int64_t> values, Purpose purpose) override {
    ++*count_;
    inner_.all_reduce(values, purpose);
  }
  void broadcast(View values, std::size_t root) override { inner_.broadcast(values, root); }
  void barrier() override { inner_.barrier(); }
  std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel) override {
    return std::unique_ptr<Communicator>(new CountingCommunicator(inner_.split(color, channel), count_));
  }
  void abort(std::string_view reason) override { inner_.abort(reason); }
  void leave(const LeaveReason& leave_reason) override { inner_.leave(leave_reason); }
  void set_activity(std::string_view activity) override { inner_.set_activity(activity); }
  std::vector<std::size_t> failed_ranks() const override { return inner_.failed_ranks(); }

 private:
  CountingCommunicator(std::unique_ptr<Communicator> owned, std::shared_ptr<std::atomic<std::size_t>> count)
      : owned_(std::move(owned)), inner_(*owned_), count_(std::move(count)) {}

  std::unique_ptr<Communicator> owned_{};
  Communicator& inner_;
  std::shared_ptr<std::atomic<std::size_t>> count_ = std::make_shared<std::atomic<std::size_t>>(0);
};

}  // namespace ballast::testing

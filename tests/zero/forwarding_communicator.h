// Passes all calls on to another communicator. A subclass overrides the calls that it watches, and split() with a channel.
#pragma once

#include <ballast/comm.h>

#include <memory>
#include <utility>
#include <vector>

#include "zero/comm/call.h"

namespace ballast::testing {

class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(Communicator& inner) : inner_(inner) {}

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
  void use_look_ahead(LookAhead* of_caller) override { inner_.use_look_ahead(of_caller); }
  void use_memory(View received, View sums) override { inner_.use_memory(received, sums); }
  void all_reduce(std::span<std::int64_t> values) override { all_reduce(values, Purpose::values); }
  void all_reduce(std::span<std::int64_t> values, Purpose purpose) override { inner_.all_reduce(values, purpose); }
  std::size_t ranks_per_host() const override { return inner_.ranks_per_host(); }
  SentBytes sent() const override { return inner_.sent(); }
  void exchange(std::span<const SentPart> sent, std::span<const ReceivedPart> received) override {
    inner_.exchange(sent, received);
  }
  using Communicator::split;
  std::unique_ptr<Communicator> split(std::size_t color) override { return split(color, nullptr); }
  void broadcast(View values, std::size_t root) override { inner_.broadcast(values, root); }
  void barrier() override { inner_.barrier(); }
  void abort(std::string_view reason) override { inner_.abort(reason); }
  void leave(const LeaveReason& leave_reason) override { inner_.leave(leave_reason); }
  void set_activity(std::string_view activity) override { inner_.set_activity(activity); }
  std::vector<std::size_t> failed_ranks() const override { return inner_.failed_ranks(); }

 protected:
  explicit ForwardingCommunicator(std::unique_ptr<Communicator> owned) : owned_(std::move(owned)), inner_(*owned_) {}

  std::unique_ptr<Communicator> part(std::size_t color, const Channel* channel) { return inner_.split(color, channel); }

 private:
  std::unique_ptr<Communicator> owned_{};
  Communicator& inner_;
};

}  // namespace ballast::testing

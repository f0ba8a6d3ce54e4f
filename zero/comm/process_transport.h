// The common part of all transports between processes.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "zero/comm/process_group.h"
#include "zero/comm/transport.h"
#include "zero/comm/two_level.h"

namespace ballast {

// Makes the transport of a group. All its ranks call it. With a stream, it carries GPU memory.
using MakeTransport =
    std::function<std::unique_ptr<Transport>(const ProcessGroup& group, const std::optional<GpuStream>& stream)>;

class ProcessTransport : public Transport {
 public:
  ProcessTransport(ProcessGroup group, MakeTransport make) : group_(std::move(group)), make_(std::move(make)) {
    const std::vector<std::string> hosts = group_.hosts();
    ranks_per_host_ = ballast::ranks_per_host(hosts);
    std::ranges::transform(hosts, std::back_inserter(is_here_),
                           [&](const std::string& host) { return host == hosts[group_.rank()]; });
    ranks_here_ = static_cast<std::size_t>(std::ranges::count(is_here_, true));
  }

  std::size_t rank() const override { return group_.rank(); }
  std::size_t size() const override { return group_.size(); }
  std::size_t ranks_per_host() const override { return ranks_per_host_; }
  std::size_t ranks_here() const override { return ranks_here_; }
  bool is_here(std::size_t peer) const override { return is_here_[peer]; }
  void abort(std::string_view reason) override { group_.job().fail(reason); }
  void leave(const LeaveReason& leave_reason) override { group_.job().leave(leave_reason); }
  void set_activity(std::string_view activity) override { group_.job().control().set_activity(activity); }
  std::vector<std::size_t> failed_ranks() const override { return group_.job().error().ranks(); }
  std::unique_ptr<Transport> split(std::span<const std::size_t> ranks,
                                   const std::optional<GpuStream>& stream) override {
    return make_(group_.part(ranks), stream);
  }

 protected:
  ProcessGroup& group() { return group_; }
  const ProcessGroup& group() const { return group_; }

 private:
  ProcessGroup group_;
  MakeTransport make_;
  std::size_t ranks_per_host_ = 1;
  std::vector<bool> is_here_{};  // by rank: on this rank's host
  std::size_t ranks_here_ = 1;
};

}  // namespace ballast

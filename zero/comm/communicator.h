// The interface of collectives. Every rank of a group makes the same calls in the same order.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "kernels/runtime/view.h"
#include "zero/comm/gpu_stream.h"
#include "zero/comm/leave_reason.h"
#include "zero/comm/purpose.h"

namespace ballast {

class Allocator;
namespace kernels {
class Backend;
}

// The GPU stream of a group, and the backend that adds on it. Both outlive the group. With a channel, calls return when
// their work is issued into the stream.
struct Channel {
  GpuStream stream{};
  kernels::Backend* backend = nullptr;
};

// Threads: one thread at a time uses a communicator. Other threads may use other communicators of the process
// meanwhile. Failure: a call that fails on any rank ends the group. Pending and later calls of all ranks throw B3301
// with the first error.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual std::size_t rank() const = 0;
  virtual std::size_t size() const = 0;

  // An allocator of host memory that the other ranks of this machine read in place; null if there is none. Large arrays
  // in it are not copied through buffers: `all` of a gather and a scatter, `all` and `into` of an all_reduce, `values`
  // of a broadcast. In one collective the arrays of all ranks lie in such memory, or of none. Release it before the
  // last group ends.
  virtual Allocator* shared_memory() = 0;

  // Writes every rank's `mine` into `all`, in rank order. `mine` may be its own part of `all`.
  virtual void all_gather(ConstView mine, View all) = 0;
  // Adds the ranks' `all` to zeros in rank order and writes this rank's part, or the whole, into `into`, which is fp32.
  virtual void reduce_scatter(ConstView all, View into) = 0;
  virtual void all_reduce(ConstView all, View into) = 0;
  // Adds integers, which are exact in any order, in place. All ranks name the same purpose.
  virtual void all_reduce(std::span<std::int64_t> values, Purpose purpose) = 0;
  void all_reduce(std::span<std::int64_t> values) { all_reduce(values, Purpose::values); }
  // Copies the values of rank `root` to all ranks.
  virtual void broadcast(View values, std::size_t root) = 0;
  virtual void barrier() = 0;

  // Makes one group of the ranks that name the same color, in rank order. With one color for all, it is a second group
  // of the same ranks, for another thread. Without a channel the new group works where this one does. With a channel,
  // processes use NCCL, whatever transport this group has (B2301 without NCCL), and threads copy on the GPU.
  virtual std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel) = 0;
  std::unique_ptr<Communicator> split(std::size_t color) { return split(color, nullptr); }

  // Ends this group and all groups related to it by split(). Any thread may call.
  virtual void abort(std::string_view reason) = 0;

  // Announces that this rank leaves this group and all groups related to it by split(). Waits for no other rank. No
  // collective may follow; if `leave_reason` reports a failure, pending collectives end. Any thread may call; only the
  // first call counts. The end of the last group of a process announces the same.
  virtual void leave(const LeaveReason& leave_reason) = 0;

  // Sets what this rank is doing ("is in step 4"), for error messages. Any thread may call.
  virtual void set_activity(std::string_view activity) = 0;
};

}  // namespace ballast

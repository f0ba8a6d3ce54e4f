// What ranks say to each other. Every rank of a group makes the same calls in the same order.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "kernels/runtime/view.h"
#include "zero/comm/call.h"
#include "zero/comm/farewell.h"
#include "zero/comm/gpu_place.h"

namespace ballast {

class Allocator;
namespace kernels {
class Backend;
}

// Where on a GPU a group's work goes, and the backend that makes its sums there; stream and backend outlive the group. Calls
// then return when their work is issued.
struct Channel {
  GpuPlace place{};
  kernels::Backend* backend = nullptr;
};

// Used by one thread at a time; other communicators of the same process may be in use by other threads meanwhile. A call
// that fails, on whichever rank, ends the group: every rank's pending and later calls throw B3301 with the first error.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual std::size_t rank() const = 0;
  virtual std::size_t size() const = 0;

  // Host memory that the other ranks of this machine read in place, in every group of theirs; null where there is none. What
  // is large and lies in it is not copied in between: `all` of a gather and a scatter, `all` and `into` of an all_reduce,
  // `values` of a broadcast. All of a collective's ranks have it there then, or none. To be given back before the last group
  // goes.
  virtual Allocator* shared_memory() = 0;

  // all = every rank's `mine`, in rank order. `mine` may lie in `all` at its place.
  virtual void all_gather(ConstView mine, View all) = 0;
  // into = the ranks' `all`, added to zeros in rank order: a rank's own part of it, or the whole. `into` is fp32.
  virtual void reduce_scatter(ConstView all, View into) = 0;
  virtual void all_reduce(ConstView all, View into) = 0;
  // Integers are exact in any order. Ranks whose purposes differ make different calls.
  virtual void all_reduce(std::span<std::int64_t> values, Purpose purpose) = 0;
  void all_reduce(std::span<std::int64_t> values) { all_reduce(values, Purpose::any); }
  // values = those of the rank `root`.
  virtual void broadcast(View values, std::size_t root) = 0;
  virtual void barrier() = 0;

  // The ranks that name the same color form a group, in rank order. With one color for all it is a second group of the
  // same ranks, for another thread. Without a channel its work goes where this group's goes; with one it goes by NCCL
  // between processes, whichever way this group's bytes go (without NCCL: B2301), and by copies between threads.
  virtual std::unique_ptr<Communicator> split(std::size_t color, const Channel* channel) = 0;
  std::unique_ptr<Communicator> split(std::size_t color) { return split(color, nullptr); }

  // Ends the group, and all that were split from it or that it was split from. Any thread may call.
  virtual void abort(std::string_view reason) = 0;

  // Says goodbye for this group, all that were split from it and all that it was split from, as the last of them does when it
  // goes; but waits for no other rank. No collective may follow; after a failure, those under way end. Any thread may call;
  // only the first call counts.
  virtual void leave(const Farewell& farewell) = 0;

  // Sets what this rank is doing ("is in step 4"), for what its errors say. Any thread may call.
  virtual void set_activity(std::string_view activity) = 0;
};

}  // namespace ballast

// Transports between processes: their common part, and the functions that make them.
#pragma once

#include <ballast/memory.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/comm/process_group.h"
#include "zero/comm/transport.h"

namespace ballast {

class SharedPages;

// Makes the transport of a group. All its ranks call it. With a stream, it carries GPU memory.
using MakeTransport =
    std::function<std::unique_ptr<Transport>(const ProcessGroup& group, const std::optional<GpuStream>& stream)>;

class ProcessTransport : public Transport {
 public:
  ProcessTransport(const ProcessGroup& group, MakeTransport make)
      : Transport(group.rank(), group.hosts()), group_(group), make_(std::move(make)) {}

  void abort(std::string_view reason) override { group_.job().fail(reason); }
  void leave(const LeaveReason& leave_reason) override { group_.job().leave(leave_reason); }
  void set_activity(std::string_view activity) override { group_.job().set_activity(activity); }
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
};

// All ranks of the group call these together. `make` makes the transports of groups that are split off.

// Moves bytes through shared memory of one machine. Each rank copies what it sends into its own buffers, in pieces that
// fit the caches, and the others read them there. Arrays that lie in shared memory are read in place. Throws B2301 on
// all ranks of the group if one of them cannot map the memory of another. Groups that are split off have the same
// `pages`, those of the process.
std::unique_ptr<Transport> shared_memory_transport(const ProcessGroup& group, std::shared_ptr<SharedPages> pages,
                                                   MemoryAccounts& accounts, const MakeTransport& make);

bool has_gloo();  // whether this build includes Gloo

// Moves bytes through Gloo, over TCP on the address by which this process reaches its hub. Throws B2301 without Gloo.
std::unique_ptr<Transport> gloo_transport(const ProcessGroup& group, MemoryAccounts& accounts,
                                          const MakeTransport& make);

std::string no_nccl_because();  // empty if NCCL can be used

// Moves bytes between GPUs through NCCL, in the order of a stream. NCCL only moves bytes: its sums have another order.
// Throws B2301 without NCCL, which a group of one rank does not need. The backend works on the same stream; calls
// return when their work is issued. `host` carries chunks in host memory. Ranks that make different calls are not
// detected. A rank that does not arrive in time is detected; then the communicators of this process are aborted, so
// that no stream waits for it.
std::unique_ptr<Transport> nccl_transport(std::unique_ptr<Transport> host, const ProcessGroup& group,
                                          const GpuStream& stream, MemoryAccounts& accounts, const MakeTransport& make);

}  // namespace ballast

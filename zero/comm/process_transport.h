// Groups of processes of a job, and transports between them.
#pragma once

#include <ballast/memory.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/runtime/system_resources.h"
#include "zero/comm/job.h"
#include "zero/comm/transport.h"

namespace ballast {

// The strings that a group of processes exchanges before it has a transport, and what it knows of its members. Used by one
// thread at a time.
class ProcessGroup {
 public:
  explicit ProcessGroup(std::shared_ptr<Job> job, std::size_t rank);  // the group of all processes

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return members_.size(); }
  const std::string& name() const { return name_; }  // unique in the job
  std::string member(std::size_t rank) const { return text(members_[rank]); }
  std::size_t rank_in_job(std::size_t rank) const { return members_[rank].rank; }
  bool is_on_one_machine() const;  // whether all ranks can share memory
  Job& job() const { return *job_; }
  std::vector<std::string> hosts() const;  // the host of each rank

  // The calls of Job, with ranks of this group.
  [[noreturn]] void fail_late(std::size_t rank) const { job_->fail_late({members_[rank].rank}); }
  [[noreturn]] void fail_late_of_others() const;  // when it is not known which of the other ranks is late
  Job::Wait wait_for(std::size_t rank) const { return {*job_, {members_[rank].rank}}; }
  bool has_left(std::size_t rank) const { return job_->has_left(members_[rank].rank); }
  [[noreturn]] void fail_after_leave(std::size_t rank) const { job_->fail_after_leave(members_[rank].rank); }
  void fail_because_of(std::size_t rank, const std::string& what) const { job_->fail(what, {members_[rank].rank}); }
  void wait_for_reason(std::size_t rank) const { job_->wait_for_reason(members_[rank].rank); }

  // Return the group of `ranks` of this one. All of them call.
  ProcessGroup part(std::span<const std::size_t> ranks);

  // Return the string of each rank about a subject, by rank. All ranks of the group call.
  std::vector<std::string> exchange_strings(const std::string& subject, const std::string& mine);

 private:
  std::shared_ptr<Job> job_;
  std::string name_ = "all";
  std::vector<Member> members_;
  std::size_t rank_;
  std::size_t parts_ = 0;
};

// Returns a TCP connection with each other rank, by rank; none with this one. Only processes that know the job's secret get
// one. All ranks of the group call. Throws B3301 or B3302 if a rank fails or does not come.
std::vector<Descriptor> connect_links(ProcessGroup& group);

class SharedPages;

// What the transports of a job's groups are made with.
struct TransportSetup {
  HostTransport transport = HostTransport::fastest;
  Log* log = nullptr;
  MemoryAccounts* accounts = nullptr;
  std::shared_ptr<SharedPages> pages{};  // of the process
  std::optional<GpuStream> stream{};     // that of groups for GPU memory
};

// Makes the transport of a group. All its ranks call it.
std::unique_ptr<Transport> make_transport(const ProcessGroup& group, const TransportSetup& setup);

// The common part of transports between processes.
class ProcessTransport : public Transport {
 public:
  ProcessTransport(const ProcessGroup& group, const TransportSetup& setup)
      : Transport(group.rank(), group.hosts()), group_(group), setup_(setup) {}

  void abort(std::string_view reason) override { group_.job().fail(reason); }
  void leave(const LeaveReason& leave_reason) override { group_.job().leave(leave_reason); }
  void set_activity(std::string_view activity) override { group_.job().set_activity(activity); }
  std::vector<std::size_t> failed_ranks() const override { return group_.job().error().ranks(); }
  std::unique_ptr<Transport> split(std::span<const std::size_t> ranks,
                                   const std::optional<GpuStream>& stream) override {
    TransportSetup setup = setup_;
    if (stream) setup.stream = stream;
    return make_transport(group_.part(ranks), setup);
  }

 protected:
  ProcessGroup& group() { return group_; }
  const ProcessGroup& group() const { return group_; }
  const TransportSetup& setup() const { return setup_; }

  // Calls body(peer) for each other rank.
  template <class Body>
  void each_peer(Body&& body) const {
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) body(peer);
    }
  }

 private:
  ProcessGroup group_;
  TransportSetup setup_;
};

// All ranks of the group call these together.

// Moves bytes through shared memory of one machine. Each rank copies what it sends into its own buffers, in pieces that
// fit the caches, and the others read them there. Arrays that lie in shared memory are read in place. Throws B2301 on
// all ranks of the group if one of them cannot map the memory of another.
std::unique_ptr<Transport> shared_memory_transport(const ProcessGroup& group, const TransportSetup& setup);

bool has_gloo();  // whether this build includes Gloo

// Moves bytes through Gloo, over TCP on the address by which this process reaches its hub. Throws B2301 without Gloo.
std::unique_ptr<Transport> gloo_transport(const ProcessGroup& group, const TransportSetup& setup);

std::string no_nccl_because();  // empty if NCCL can be used

// Moves bytes between GPUs through NCCL, in the order of a stream. NCCL only moves bytes: its sums have another order.
// Throws B2301 without NCCL, which a group of one rank does not need. The backend works on the same stream; calls
// return when their work is issued. `host` carries chunks in host memory. Ranks that make different calls are not
// detected. A rank that does not arrive in time is detected; then the communicators of this process are aborted, so
// that no stream waits for it.
std::unique_ptr<Transport> nccl_transport(std::unique_ptr<Transport> host, const ProcessGroup& group,
                                          const TransportSetup& setup);

}  // namespace ballast

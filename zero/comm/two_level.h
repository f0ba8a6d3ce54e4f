// Collectives of ranks on several hosts, by which each link carries what its host lacks only once. Inside a host, rank l of each
// host adds, or hands out, what all hosts have for their ranks l; between hosts these ranks exchange it.
#pragma once

#include <memory>

#include "kernels/backend.h"
#include "zero/comm/transport.h"

namespace ballast {

// Adds arrays of all ranks: in fp32 those of each host's ranks, in rank order, and then the hosts' sums, in the order of hosts.
// The result is rounded once to the format of `into`.
void sum_by_host(Transport& transport, kernels::Backend& backend, std::span<const ConstView> by_rank, const View& into);

// Used by one thread, with the calls of Communicator. The order of sums is that of sum_by_host().
class TwoLevel {
 public:
  // All ranks call. The group and the backend outlive this object.
  TwoLevel(Transport& group, kernels::Backend& backend);

  void all_gather(const Sent& sent, const View& all);
  void reduce_scatter(const Call& call, const ConstView& all, const View& into);

  // Sums inside of a host are complete before hosts exchange them, so both levels use the same memory.
  void use_memory(const View& received, const View& sums);

  Transport& inside() { return *inside_; }
  Transport& across() { return *across_; }
  SentBytes sent() const;

 private:
  void add_inside(const Call& call, const ConstView& all, const View& sums, std::size_t first, std::size_t count);

  kernels::Backend& backend_;
  std::unique_ptr<Transport> inside_;  // the ranks of this host
  std::unique_ptr<Transport> across_;  // one rank of each host
};

}  // namespace ballast

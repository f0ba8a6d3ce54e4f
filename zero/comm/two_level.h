// Collectives of ranks on several hosts, by which each link carries what its host lacks only once. Inside a host, rank l of each
// host adds, or hands out, what all hosts have for their ranks l; between hosts these ranks exchange it.
#pragma once

#include <memory>
#include <vector>

#include "kernels/backend.h"
#include "zero/comm/transport.h"

namespace ballast {

// Memory of a transport for sums on their way.
inline View sums_of(Transport& transport, std::size_t count) {
  return {transport.scratch(count * sizeof(float)), count, DType::fp32};
}

// Adds arrays of all ranks: in fp32 those of each host's ranks, in rank order, and then the hosts' sums, in the order of hosts.
// The result is rounded once to the format of `into`.
inline void sum_by_host(Transport& transport, kernels::Backend& backend, std::span<const ConstView> by_rank,
                        const View& into) {
  const std::size_t neighbours = transport.ranks_per_host();
  if (neighbours == 1) return backend.sum(by_rank, into);
  const View sums = sums_of(transport, by_rank.size() / neighbours * into.count());
  std::vector<ConstView> by_host;
  for (std::size_t first = 0; first < by_rank.size(); first += neighbours) {
    const View sum = sums.part(by_host.size() * into.count(), into.count());
    backend.sum(by_rank.subspan(first, neighbours), sum);
    by_host.push_back(sum);
  }
  backend.sum(by_host, into);
}

// Used by one thread, with the calls of Communicator. The order of sums is that of sum_by_host().
class TwoLevel {
 public:
  // All ranks call. The group and the backend outlive this object.
  TwoLevel(Transport& group, kernels::Backend& backend) : backend_(backend) {
    const std::size_t neighbours = group.ranks_per_host();
    const std::size_t place = group.rank() % neighbours;
    inside_ = group.split(every(1, group.rank() - place, neighbours), std::nullopt);
    across_ = group.split(every(neighbours, place, group.size() / neighbours), std::nullopt);
  }

  // What arrives from the other hosts is handed out while more of it arrives.
  void all_gather(const Sent& sent, const View& all) {
    const std::size_t count = sent.values.count();
    exchange_together(*across_, sent, [&](std::span<const ConstView> by_host, std::size_t first) {
      for (std::size_t host = 0; host < by_host.size(); ++host) {
        exchange(*inside_, {.call = sent.call, .values = by_host[host]},
                 [&](std::size_t place, const ConstView& theirs, std::size_t at) {
                   const std::size_t rank = host * inside_->size() + place;
                   const View to = all.part(rank * count + first + at, theirs.count());
                   if (to.data() != theirs.data()) backend_.cast(theirs, to);
                 });
      }
    });
  }

  // The sums inside this host are made piece by piece, while those before are on their way to the other hosts.
  void reduce_scatter(const Call& call, const ConstView& all, const View& into) {
    const View sums = sums_of(*across_, across_->size() * into.count());
    const View first_sum = sums.part(0, into.count());
    exchange_together(
        *across_, {.call = call, .values = first_sum, .stride = first_sum.bytes()},
        [&](std::size_t first, std::size_t count) { add_inside(call, all, sums, first, count); },
        [&](std::span<const ConstView> by_host, std::size_t first) {
          backend_.sum(by_host, into.part(first, by_host.front().count()));
        });
  }

  // Sums inside of a host are complete before hosts exchange them, so both levels use the same memory.
  void use_memory(const View& received, const View& sums) {
    inside_->use_memory(received, sums);
    across_->use_memory(received, sums);
  }

  Transport& inside() { return *inside_; }
  Transport& across() { return *across_; }
  SentBytes sent() const { return inside_->sent() + across_->sent(); }

 private:
  static std::vector<std::size_t> every(std::size_t step, std::size_t first, std::size_t count) {
    std::vector<std::size_t> ranks;
    for (std::size_t i = 0; i < count; ++i) {
      ranks.push_back(first + i * step);
    }
    return ranks;
  }

  // Adds the ranks of this host: for each host, the elements from `first` on of the part of its rank in this place.
  void add_inside(const Call& call, const ConstView& all, const View& sums, std::size_t first, std::size_t count) {
    const std::size_t part = sums.count() / across_->size();
    for (std::size_t host = 0; host < across_->size(); ++host) {
      const ConstView values = all.part(host * inside_->size() * part + first, count);
      exchange_together(*inside_, {.call = call, .values = values, .stride = part * byte_size(all.dtype())},
                        [&](std::span<const ConstView> by_rank, std::size_t at) {
                          backend_.sum(by_rank, sums.part(host * part + first + at, by_rank.front().count()));
                        });
    }
  }

  kernels::Backend& backend_;
  std::unique_ptr<Transport> inside_;  // the ranks of this host
  std::unique_ptr<Transport> across_;  // one rank of each host
};

}  // namespace ballast

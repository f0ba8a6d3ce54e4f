// The memory in which a GPU's reductions receive what other ranks send, and add. Groups of GPUs (zero/comm) exchange by these
// sizes, and plans count them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <set>
#include <type_traits>

#include "kernels/quantize.h"
#include "kernels/runtime/sizes.h"

namespace ballast::kernels {

// The limit of one exchange of all ranks: a transformer's layer in most models, so that its gradients are added in one
// pass.
inline constexpr std::size_t max_received_bytes = std::size_t{512} << 20;
inline constexpr std::size_t received_alignment = 512;

// Up to this size every rank of an all_reduce adds everything, in one exchange. Above it each rank adds a part, and the parts
// are gathered. Both give the same bits.
inline constexpr std::size_t added_by_all_bytes = std::size_t{64} << 10;

// The most that a rank sends to each other rank in one exchange, as blocks of so many bytes.
constexpr std::size_t most_sent_bytes(std::size_t ranks, std::size_t block = 1) {
  const std::size_t most = max_received_bytes / ranks / received_alignment * received_alignment;
  return most - most % block;
}

// What the ranks send lies one after the other.
constexpr std::size_t received_bytes(std::size_t ranks, std::size_t sent) {
  return ranks * round_up(sent, received_alignment);
}

// Pieces of codes that are exchanged begin at multiples of this.
constexpr std::size_t exchanged_block_bytes(CodeBits bits) { return std::lcm(block_bytes(bits), code_alignment); }

// A group of ranks. With several ranks on each of several hosts, those of a host are added before hosts are.
struct ReducingRanks {
  std::size_t ranks = 1;
  std::size_t per_host = 1;  // 1: ranks are added in rank order

  constexpr std::size_t hosts() const { return ranks / per_host; }
};

// Returns the number of ranks of each host, or 1 if sums are in rank order: on one host, with one rank a host, and where hosts
// have different numbers of ranks, or ranks that are no neighbours. `hosts` names the host of each rank.
template <class Hosts>
std::size_t ranks_per_host(const Hosts& hosts) {
  std::size_t ranks = 1;
  while (ranks < hosts.size() && hosts[ranks] == hosts[0]) {
    ++ranks;
  }
  if (ranks == 1 || ranks >= hosts.size() || hosts.size() % ranks != 0) return 1;
  std::set<std::decay_t<decltype(hosts[0])>> seen;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const bool is_first = rank % ranks == 0;
    if (is_first ? !seen.insert(hosts[rank]).second : hosts[rank] != hosts[rank - 1]) return 1;
  }
  return ranks;
}

struct ReductionMemory {
  std::size_t received = 0;
  std::size_t sums = 0;  // sums on their way between hosts, and their codes

  constexpr ReductionMemory with(const ReductionMemory& other) const {
    return {std::max(received, other.received), std::max(sums, other.sums)};
  }
};

// Returns the memory of a reduce_scatter: `count` elements for each rank, of `width` bytes.
constexpr ReductionMemory memory_of_scatter(const ReducingRanks& group, std::size_t count, std::size_t width) {
  if (group.ranks == 1 || count == 0) return {};
  if (group.per_host == 1) {
    return {.received = received_bytes(group.ranks, std::min(count * width, most_sent_bytes(group.ranks)))};
  }
  const std::size_t across = std::min(count * sizeof(float), most_sent_bytes(group.hosts()));
  const std::size_t inside = std::min(across / sizeof(float) * width, most_sent_bytes(group.per_host));
  return {.received = std::max(received_bytes(group.hosts(), across), received_bytes(group.per_host, inside)),
          .sums = group.hosts() * count * sizeof(float)};
}

// Returns the memory of an all_reduce: `count` elements in all.
constexpr ReductionMemory memory_of_sum(const ReducingRanks& group, std::size_t count, std::size_t width) {
  if (group.ranks == 1 || count == 0) return {};
  const std::size_t part = count * width <= added_by_all_bytes ? 0 : count / group.ranks;
  const std::size_t rest =
      std::min((count - part * group.ranks) * width, most_sent_bytes(group.ranks));  // every rank adds it
  const std::size_t sums = group.per_host == 1 ? 0 : group.hosts() * (rest / width) * sizeof(float);
  return memory_of_scatter(group, part, width).with({received_bytes(group.ranks, rest), sums});
}

// Returns the memory of codes: of `count` elements for each rank, or of part_of_groups() in an all_reduce.
constexpr ReductionMemory memory_of_codes(const ReducingRanks& group, std::size_t count, CodeBits values,
                                          CodeBits sums) {
  if (group.ranks == 1 || count == 0) return {};
  const auto sent = [](std::size_t ranks, std::size_t elements, CodeBits bits) {
    return std::min(quantized_bytes(elements, bits), most_sent_bytes(ranks, exchanged_block_bytes(bits)));
  };
  if (group.per_host == 1) return {.received = received_bytes(group.ranks, sent(group.ranks, count, values))};
  const std::size_t across = sent(group.hosts(), count, sums);
  const std::size_t stretch = std::min(across / block_bytes(sums) * group_size, count);
  const std::size_t inside = sent(group.per_host, stretch, values);
  return {.received = std::max(received_bytes(group.hosts(), across), received_bytes(group.per_host, inside)),
          .sums = group.hosts() * encoded_part_bytes(count, sums) + count * sizeof(float)};
}

}  // namespace ballast::kernels

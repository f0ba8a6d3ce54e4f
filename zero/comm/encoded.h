// Encoded collectives as exchanges of a transport. All ranks decode the same bytes, their own included, so that their results are
// equal bit by bit.
#pragma once

#include <functional>
#include <utility>

#include "kernels/backend.h"
#include "zero/comm/encoding.h"
#include "zero/comm/transport.h"
#include "zero/comm/two_level.h"

namespace ballast {

// Writes the bytes `mine` of every rank into `all`, in rank order. `mine` is this rank's part of `all`.
using GatherBytes = std::function<void(const Call& call, const ConstView& mine, const View& all)>;

// Used by one thread, for one call. All that it refers to outlives it. The bits depend on the group's ranks per host, and not on its
// transport: with one level, a rank rounds the sums of hosts as those would for the link.
class EncodedCollective {
 public:
  // `levels`: of a group whose collectives have two levels, else null.
  EncodedCollective(Transport& group, TwoLevel* levels, GatherBytes gather, kernels::Backend& backend, const Call& call,
                    const Encoding& encoding)
      : group_(group),
        levels_(levels),
        gather_(std::move(gather)),
        backend_(backend),
        call_(call),
        encoding_(encoding) {}

  void all_gather(const ConstView& mine, const View& all);
  void reduce_scatter(const ConstView& all, const View& into);
  void all_reduce(const ConstView& all, const View& into);

 private:
  // What is rounded: no two roundings of an element share random bits.
  enum class Rounded : std::uint8_t { values, sums_of_hosts, result };

  // A stretch of a part, as elements of the part. Encoded, it begins at a block.
  struct Stretch {
    std::size_t first = 0;
    std::size_t count = 0;
  };
  // Elements that are divided into parts of equal size, one for each rank; the last ones may be short, or empty.
  struct Parts {
    std::size_t count = 0;  // of all elements
    std::size_t part = 0;
    Stretch clip(std::size_t rank, const Stretch& stretch) const;  // without what the part lacks
    std::size_t begin(std::size_t rank) const { return std::min(rank * part, count); }
    // The number of an element of a rank's part, as if each part began at a block.
    std::size_t number(std::size_t rank, std::size_t i) const {
      return rank * kernels::block_count(part) * group_size + i;
    }
  };

  void require_memory(std::size_t bytes) const;
  void hand_out(const Parts& parts, kernels::CodeBits bits, const View& all);
  void add_parts(const ConstView& all, const Parts& parts, const View& into);
  void add_in_two_levels(const ConstView& all, const Parts& parts, const View& into);
  void encode_part(const ConstView& all, const Parts& parts, std::size_t rank, const Stretch& stretch);
  void add_inside(const ConstView& all, const Parts& parts, std::size_t host, const Stretch& stretch, const View& sum);
  void sum_by_host(std::span<const ConstView> by_rank, std::size_t first, const View& into);
  // Rounds stochastically. `rounder`: the rank or the host that rounds. `first`: the number of the first value.
  void encode(const ConstView& values, Rounded what, std::size_t rounder, std::size_t first,
              const kernels::Quantized& to);
  View memory(std::size_t first, std::size_t bytes) const { return encoding_.memory.part(first, bytes); }

  Transport& group_;
  TwoLevel* levels_;
  GatherBytes gather_;
  kernels::Backend& backend_;
  Call call_;
  Encoding encoding_;
};

}  // namespace ballast

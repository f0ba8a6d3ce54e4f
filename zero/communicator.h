// What ranks say to each other. Every rank of a group makes the same calls in the same order.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/runtime/view.h"

namespace ballast {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual std::size_t rank() const = 0;
  virtual std::size_t size() const = 0;

  // all = every rank's `mine`, in rank order. `mine` may lie in `all` at its place.
  virtual void all_gather(ConstView mine, View all) = 0;
  // into += the ranks' `all`, added in rank order: a rank's own part of it, or the whole. `into` is fp32.
  virtual void reduce_scatter(ConstView all, View into) = 0;
  virtual void all_reduce(ConstView all, View into) = 0;
  // Integers are exact in any order.
  virtual void all_reduce(std::span<std::int64_t> values) = 0;
  virtual void barrier() = 0;

  // Every rank's pending and later call throws B3301. Any thread may call.
  virtual void abort() = 0;
};

}  // namespace ballast

// The operations of a program that compute or copy: what they mean for memory.
#pragma once

#include "kernels/backend.h"
#include "zero/plan/plan.h"
#include "zero/slots.h"
#include "zero/step.h"

namespace ballast {

class Arithmetic {
 public:
  Arithmetic(const Plan& plan, const Slots& slots, kernels::Backend& backend)
      : plan_(plan), slots_(slots), backend_(backend) {}

  void clear(const Op& op) const;
  void copy(const Op& op) const;
  void accumulate(const Op& op) const;
  void add_squares(const Op& op) const;
  void update(const Op& op, const StepNumbers& step) const;

  // The element of a unit's trained shard that is the first not to be finite; kernels::no_index if all are.
  std::uint64_t first_non_finite(const Op& op) const;

  // A tile's first state: zero, but for a master that is not in the parameter.
  void begin_state(std::size_t unit, std::size_t count, const View& parameters, std::span<std::byte> state) const;

 private:
  DType dtype(const Op& op) const { return plan_.model().units[op.unit].dtype; }

  const Plan& plan_;
  const Slots& slots_;
  kernels::Backend& backend_;
};

}  // namespace ballast

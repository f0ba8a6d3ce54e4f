// The operations of one lane that compute or copy, applied to memory.
#pragma once

#include <ballast/step.h>

#include <array>
#include <optional>

#include "kernels/backend.h"
#include "kernels/state_access.h"
#include "zero/engine/exec_context.h"
#include "zero/engine/lanes.h"
#include "zero/engine/slots.h"
#include "zero/engine/step_run.h"
#include "zero/plan/compile.h"

namespace ballast {

// Called by its lane's thread and, between steps, when nothing is under way, by the trainer's. On a GPU all work is
// issued into the lane's stream; functions that return a value wait for it.
class Arithmetic {
 public:
  Arithmetic(const CompiledPlan& plan, const Slots& slots, const ExecContext& context)
      : plan_(plan), slots_(slots), context_(context) {}

  const ExecContext& context() const { return context_; }

  void clear(const Op& op) const;
  void copy(const Op& op) const;
  void accumulate(const Op& op, std::uint64_t step) const;
  void add_squares(const Op& op) const;
  kernels::ExactSum read_sum(const Piece& squares) const;
  kernels::ExactSum take_sum(const Piece& squares) const;  // reads it and leaves zero
  void update(const Op& op, const StepNumbers& step) const;
  void make_direction(const Op& momentum, const StepNumbers& step) const;  // the first part of a rule of whole matrices

  // The memory and the rules of an update.
  TileMemory tile_of(const Op& update, const StepNumbers& step) const;
  std::vector<kernels::Run> runs_of(const Op& update, const StepNumbers& step) const;
  const std::byte* state_of(const Op& update) const { return slots_.data(update.state); }

  // The first element of a norm operation's gradients that is not finite; kernels::no_index if all are. Works in the
  // memory of the operation's sum, which must have been taken, and leaves it zero.
  std::uint64_t first_non_finite(const Op& norm) const;

  // Sums over parts of norm operations' gradients. They are computed in the memory of the operations' sum, one after the
  // other, so that memory is saved before and restored afterwards. `host` must stay until context().finish(); the calls
  // do not wait for a GPU if it is pinned.
  void save_sum(const Piece& squares, kernels::ExactSum* host) const;
  void squares_of(const Op& norm, const Range& part, kernels::ExactSum* host) const;
  void restore_sum(const Piece& squares, const kernels::ExactSum* host) const;

  // Makes a tile's state initial, in memory that is zero. Only a master that holds the parameter's bits is not zero.
  void begin_state(const TileMemory& tile) const {
    if (tile.format == StateFormat::fp32) kernels::begin_master(tile, context_.backend());
  }

 private:
  Range range_of(const Op& update) const;  // a range of the unit's elements
  DType dtype(const Op& op) const { return plan_.model().units[op.unit].dtype; }
  View sums(const Op& op, const Piece& piece) const;  // sums of the gradients of its unit

  const CompiledPlan& plan_;
  const Slots& slots_;
  ExecContext context_;
};

// The arithmetic of each lane: the same operations, in the lane's own stream or on the host.
class LaneArithmetic {
 public:
  // All arguments outlive this. Without a GPU every lane works on the host, with `cpu`.
  LaneArithmetic(const CompiledPlan& plan, const Slots& slots, kernels::Backend& cpu, const GpuLanes* gpu);
  LaneArithmetic(LaneArithmetic&&) = delete;

  const Arithmetic& of(Lane lane) const { return *lanes_[static_cast<std::size_t>(lane)]; }

  // Copies and clears memory of the device tier between steps.
  const ExecContext& copies() const { return of(Lane::upload).context(); }

 private:
  std::array<std::optional<Arithmetic>, lane_count> lanes_;
};

}  // namespace ballast

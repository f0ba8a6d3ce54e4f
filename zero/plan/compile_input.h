// What a program is compiled from.
#pragma once

#include "zero/plan/block.h"
#include "zero/plan/trace.h"

namespace ballast {

// How far ahead a program works, and when it updates. Changes no bit of the training.
struct Schedule {
  std::size_t prefetch = 1;         // how many visits ahead units are gathered
  std::size_t gathered_bytes = 0;   // for full parameters that are not kept; 0: as many as prefetching needs
  std::size_t staging_slots = 8;    // records in memory at once, on their way from and to the drive
  std::size_t kept_records = 0;     // tiles whose records stay in memory and are not read: the first ones of a step
  bool update_in_backward = false;  // as soon as a unit's gradients are summed; then nothing can be clipped or skipped
};

struct CompileInput {
  const Model& model;
  const Layout& layout;
  const Blocks& blocks;
  Placement placement;
  std::size_t rank_in_shard_group = 0;
  std::size_t micro_steps = 1;  // backward passes whose gradients one step sums
  Trace trace{};                // of each micro-step; empty: the order of declaration
  Schedule schedule{};
  bool host_is_device = false;   // on a CPU: updates on the host need no copies of parameters and gradients
  bool extra_sum_slots = false;  // slots for a second sum of a unit's gradients, even if the trace needs none
};

// Its trace, or the order of declaration if it has none.
Trace trace_of(const CompileInput& input);

// Throws what cannot be compiled, before anything else is done. Checks the model and the placement too.
void check(const CompileInput& input);

}  // namespace ballast

// Turns a model, its layout and a placement into the program of a training step. Pure: no threads, clock, CUDA or files.
#pragma once

#include "zero/plan/block.h"
#include "zero/plan/trace.h"

namespace ballast {

// How far a program runs ahead of itself, and when it updates. Changes no bit of the training.
struct Schedule {
  std::size_t prefetch = 1;         // visits ahead that units are gathered
  std::size_t gathered_bytes = 0;   // for whole units that are not kept; 0: as many as prefetching needs
  std::size_t staging_slots = 8;    // records in memory at once, on their way from and to the drive
  std::size_t kept_records = 0;     // tiles that stay in memory too and need no reading: the first ones of a step
  bool update_in_backward = false;  // as soon as a unit's gradients are summed: nothing can be clipped or skipped then
};

struct CompileInput {
  const Model& model;
  const Layout& layout;
  const Blocks& blocks;
  Placement placement;
  std::size_t rank_in_shard_group = 0;
  std::size_t micro_steps = 1;  // backward passes whose gradients one step sums
  Trace trace{};                // of each; empty: the order of declaration
  Schedule schedule{};
  bool host_is_device = false;  // a CPU's: updates on the host work where parameters and gradients lie
  bool sums_pass_by =
      false;  // memory for a unit's gradients beside those that are summed, even if the trace needs none
};

// A round in which the trainer has left the program's order.
struct DepartedRound {
  Trace visits{};              // so far, of all micro-steps
  std::size_t by_program = 0;  // the first of them, which the program's operations made
};

Trace trace_of(const CompileInput& input);  // the one that counts

// Throws what cannot be, before anything else: see check() of models and placements.
Program compile(const CompileInput& input);

// What such a round does instead of the rest of the program, in the program's slots: a list for each use, with what is held
// together, and one for the step. Each begins when everything before it is over and does nothing ahead. After the last one
// comes the program's entry. Throws B1007 for a unit that has been updated already, B2004 for one that finds no room.
std::vector<Op> compile_visits(const CompileInput& input, const DepartedRound& round, const Trace& chain);
std::vector<Op> compile_step(const CompileInput& input, const DepartedRound& round);

// A program without operations: what memory it would take, in a small part of the time.
Program outline(const CompileInput& input);

}  // namespace ballast

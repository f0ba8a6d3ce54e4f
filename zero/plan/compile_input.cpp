#include "zero/plan/compile_input.h"

#include <fmt/format.h>

#include "kernels/runtime/error.h"

namespace ballast {

Trace trace_of(const CompileInput& input) { return input.trace.empty() ? declared_order(input.model) : input.trace; }

void check(const CompileInput& input) {
  check(input.model);
  check(input.placement);
  const auto refuse = [](std::string what, std::string needed) {
    fail(Code::bad_argument, {.what = std::move(what), .needed = std::move(needed)});
  };
  if (input.model.units.size() != input.layout.units.size() || input.layout.shards != input.placement.shards) {
    refuse(fmt::format("a model of {} units on {} shards came with a layout of {} on {}", input.model.units.size(),
                       input.placement.shards, input.layout.units.size(), input.layout.shards),
           "the layout that make_layout() gives for this model and placement");
  }
  if (input.rank_in_shard_group >= input.placement.shards) {
    refuse(fmt::format("a program for rank {} was asked for", input.rank_in_shard_group),
           fmt::format("a rank below {}", input.placement.shards));
  }
  if (input.micro_steps == 0) refuse("a step of no micro-steps was asked for", "at least one");
  if (input.schedule.staging_slots == 0) refuse("records were to pass through no slots", "at least one");
  if (input.schedule.update_in_backward && input.micro_steps > 1) {
    refuse(fmt::format("updates were asked for in the backward pass of {} micro-steps", input.micro_steps),
           "one micro-step, or updates after the backward pass");
  }
}

}  // namespace ballast

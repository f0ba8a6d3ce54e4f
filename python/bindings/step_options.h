// The options that a training and a question to the planner have in common: each is told here once, with its name in Python.
#pragma once

#include <ballast/schedule.h>

#include <utility>
#include <vector>

#include "python/bindings/bindings.h"

namespace ballast::python {

// Returns a function that binds one option of `type`: its name, its meaning, and the members that lead to it. `prefix` leads to
// the struct with all of them.
template <class Owner, class... Holder, class... Prefix>
auto binder(py::class_<Owner, Holder...>& type, Prefix... prefix) {
  return [&type, prefix...](const char* name, const char* meaning, auto... members) {
    const auto at = [=](Owner & owner) -> auto& { return ((owner.*....*prefix).*....*members); };
    using Value = std::remove_reference_t<decltype(at(std::declval<Owner&>()))>;
    type.def_property(
        name, at, [at](Owner& owner, Value value) { at(owner) = std::move(value); }, meaning);
  };
}

// Calls `option` as the result of binder(). `Options` is TrainingOptions or ChoiceInput.
template <class Options, class Option>
void describe_step_options(const Option& option) {
  option("stage", "0 to 3; of a question None: it is chosen too", &Options::stage);
  option("parameter_replicas", "copies of the parameters in stage 3", &Options::parameter_replicas);
  option("format", "of the state of bf16 parameters", &Options::format);
  option("gradient_format", "of the reduced gradients of bf16 parameters", &Options::gradient_format);
  option("tile_elements", "at most in a tile; 0: the library chooses", &Options::tile_elements);
  option("wire", "the formats in which ranks send values", &Options::wire);
  option("prefetch", "units that are gathered ahead", &Options::schedule, &Schedule::prefetch);
  option("gathered_bytes", "for full parameters that are not kept", &Options::schedule, &Schedule::gathered_bytes);
  option("layer_major", "all micro-steps go through a unit before the next unit", &Options::schedule,
         &Schedule::layer_major);
  option("update_in_backward", "updates a unit as soon as its gradients are summed", &Options::schedule,
         &Schedule::update_in_backward);
  option("overlap_gathers", "updates and gathers in the order of the next forward", &Options::schedule,
         &Schedule::overlap_gathers);
  option("trace", "the uses of units in each micro-step; empty: that of a C++ trainer", &Options::trace);
}

}  // namespace ballast::python

// The model that both sides of the suite train.
#pragma once

#include <cstddef>
#include <string>

#include "zero/plan/compiled_plan.h"

namespace ballast::benchmarks {

struct Shape {
  std::size_t units = 8;
  StateFormat format = StateFormat::split;
};

// Plans `elements` parameters in all, on one rank that keeps everything in its memory.
inline CompiledPlan plan_of(const Shape& shape, std::size_t elements) {
  Model model;
  for (std::size_t unit = 0; unit < shape.units; ++unit) {
    model.units.push_back({.name = "h." + std::to_string(unit), .tensors = {{"weight", {elements / shape.units}}}});
  }
  return CompiledPlan(std::move(model), {.format = shape.format, .names = optim::AdamW::state, .rule = "AdamW"});
}

}  // namespace ballast::benchmarks

// Measures the cost that the engine adds to the arithmetic of a step.
#include <fmt/format.h>

#include "benchmarks/engine/direct_step.h"
#include "benchmarks/engine/engine_step.h"
#include "benchmarks/harness/suite.h"

namespace ballast::benchmarks {
namespace {

template <class Step>
Subject steps_of(const Shape& shape, const Setting& setting) {
  const auto step = std::make_shared<Step>(shape, setting.elements, setting.threads.count());
  return {.work = 1, .run = [step] { step->take(); }};
}

Case compared_with_arithmetic(const Shape& shape) {
  return {.name = fmt::format("step of {} units, {}", shape.units, name(shape.format)),
          .against = "the arithmetic alone",
          .make = [=](const Setting& setting) { return steps_of<EngineStep>(shape, setting); },
          .make_against = [=](const Setting& setting, double) { return steps_of<DirectStep>(shape, setting); },
          .unit = "steps/s"};
}

Suite engine_suite() {
  using enum StateFormat;
  return {.name = "engine",
          .description = "Steps through the engine, compared with the same arithmetic alone",
          .most_bytes_of_an_element = 8,
          .cases = {compared_with_arithmetic({8, split}), compared_with_arithmetic({64, split}),
                    compared_with_arithmetic({8, fp32})}};
}

}  // namespace
}  // namespace ballast::benchmarks

int main(int argc, char** argv) {
  return ballast::benchmarks::run_suite(ballast::benchmarks::engine_suite(), argc, argv);
}

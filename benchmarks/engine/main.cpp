// Measures the cost that the engine adds to the arithmetic of a step.
#include <ballast/comm.h>
#include <ballast/training.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "benchmarks/harness/suite.h"
#include "benchmarks/kernels/elementwise.h"

namespace ballast::benchmarks {
namespace {

// The model that both sides of the suite train.
struct Shape {
  std::size_t units = 8;
  StateFormat format = StateFormat::split;
};

Model model_of(const Shape& shape, std::size_t elements) {
  Model model;
  for (std::size_t unit = 0; unit < shape.units; ++unit) {
    model.units.push_back({.name = "h." + std::to_string(unit), .tensors = {{"weight", {elements / shape.units}}}});
  }
  return model;
}

// The arithmetic of a step on as much memory as the engine takes, without it: one kernel after the other, the least possible time.
// It clears the gradients of each unit, the last one first, casts them to fp32 and adds their squares. Then it updates each unit.
Subject arithmetic_alone(const Shape& shape, const Setting& setting) {
  const auto place = cpu_place(setting.threads->count());
  const std::size_t count = setting.elements / shape.units;
  const std::array used_in_turn{place->memory(count * sizeof(bf16)), place->memory(count * sizeof(bf16))};
  std::vector<View> all_reduced;
  std::vector<Subject> updates;
  for (std::size_t unit = 0; unit < shape.units; ++unit) {
    const Gradients reduced{place->memory(count * sizeof(float)), DType::fp32};
    all_reduced.emplace_back(reduced.memory.get(), count, DType::fp32);
    updates.push_back(adamw(place, shape.format, count, count, reduced));  // keeps the memory
  }
  return {.work = 1, .run = [=] {
            kernels::ExactSum squares;
            for (std::size_t unit = all_reduced.size(); unit-- > 0;) {
              const View gradients(used_in_turn[unit % 2].get(), count, DType::bf16);
              place->backend().clear(gradients);
              place->backend().cast(gradients, all_reduced[unit]);
              place->backend().sum_of_squares(all_reduced[unit], &squares);
            }
            for (const Subject& update : updates) {
              update.run();
            }
          }};
}

// A step through the engine, by a trainer that does nothing with its leases.
Subject step_of_engine(const Shape& shape, const Setting& setting) {
  struct Parts {
    std::unique_ptr<Communicator> world = single_rank();
    std::optional<Training> training{};
  };
  const auto parts = std::make_shared<Parts>();
  const TrainingOptions options{.stage = 0, .format = shape.format, .threads = setting.threads->count()};
  Training& training = parts->training.emplace(model_of(shape, setting.elements), *parts->world,
                                               std::vector<optim::Rule>{optim::AdamW{}}, options);
  const bf16 one{0x3f80};
  training.initialize([&](std::size_t, std::size_t, Range, const View& to) { std::ranges::fill(to.as<bf16>(), one); });
  return {.work = 1, .run = [parts, units = shape.units] {
            Training& training = *parts->training;
            for (std::size_t unit = 0; unit < units; ++unit) {
              training.forward(unit);
            }
            for (std::size_t unit = units; unit-- > 0;) {
              training.backward(unit);
            }
            training.step();
            training.finish();
          }};
}

std::vector<Trial> trials(const Setting& setting) {
  std::vector<Trial> all;
  for (const Shape& shape :
       {Shape{8, StateFormat::split}, Shape{64, StateFormat::split}, Shape{8, StateFormat::fp32}}) {
    all.push_back({fmt::format("step of {} units, {}", shape.units, name(shape.format)), "the arithmetic alone",
                   [&setting, shape] {
                     return Pair{step_of_engine(shape, setting), arithmetic_alone(shape, setting)};
                   },
                   "steps/s"});
  }
  return all;
}

}  // namespace
}  // namespace ballast::benchmarks

int main(int argc, char** argv) {
  return ballast::benchmarks::run_suite(
      {.name = "engine",
       .description = "Steps through the engine, compared with the same arithmetic alone",
       .most_bytes_of_an_element = 8,
       .trials = ballast::benchmarks::trials},
      argc, argv);
}

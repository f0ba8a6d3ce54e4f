// The meaning of a training's state, as lines of text. Trainings with equal lines can take over each other's records. A
// pure value, the same on every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zero/plan/compiled_plan.h"

namespace ballast {

// One fact a line: ranks, stage and rule first, then each unit's parameters, and how its state is cut and kept. Facts
// that may change from one start of a run to the next are left out: learning rates, parameter groups, tiers, schedule.
std::vector<std::string> describe(const CompiledPlan& plan);

// Elements of the largest tile that the lines name; 0 if they name none. Cutting the same shards into tiles of at most so
// many elements gives the same tiles again.
std::size_t largest_tile(std::span<const std::string> lines);

// Returns a digest that is the same in every build and on every machine, because files contain it.
std::uint64_t digest_of(std::span<const std::string> lines);

// The first line in which two descriptions differ, of each.
struct Difference {
  std::string one;
  std::string other;
};
std::optional<Difference> first_difference(std::span<const std::string> one, std::span<const std::string> other);

}  // namespace ballast

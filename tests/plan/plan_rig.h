// Models and plans for tests.
#pragma once

#include <ballast/optim.h>

#include <algorithm>
#include <iterator>

#include "zero/plan/compile.h"
#include "zero/plan/compile_input.h"

namespace ballast::testing {

struct PlanSetup {
  Model model;
  Placement placement;
  std::size_t rank = 0;
  std::size_t tile_elements = 256;
  std::size_t micro_steps = 1;
  GradientFormat gradient_format = GradientFormat::fp32;
  Schedule schedule{};
  Wire wire{};
  bool shares_memory = false;
  TransferRates rates{};
  Trace trace{};
  bool full_records = false;
  bool host_is_device = false;
  std::optional<std::size_t> orthogonalization_steps{};
};

inline CompiledPlan plan_of(const PlanSetup& setup) {
  return CompiledPlan(setup.model, {.placement = setup.placement,
                                    .rank = setup.rank,
                                    .shares_memory = setup.shares_memory,
                                    .tile_elements = setup.tile_elements,
                                    .micro_steps = setup.micro_steps,
                                    .gradient_format = setup.gradient_format,
                                    .names = setup.orthogonalization_steps ? optim::Muon::state : optim::AdamW::state,
                                    .orthogonalization_steps = setup.orthogonalization_steps,
                                    .trace = setup.trace,
                                    .schedule = setup.schedule,
                                    .wire = setup.wire,
                                    .rates = setup.rates,
                                    .full_records = setup.full_records,
                                    .host_is_device = setup.host_is_device});
}

// Units of different sizes: one alone is larger than a tile, one has frozen tensors, one is all frozen, one is empty,
// and the last is tied to the first.
inline Model odd_model(std::size_t times = 1) {  // `times` as large
  return {{
      {.name = "embedding", .tensors = {{"weight", {times * 30, 29}}}},
      {.name = "h.0", .tensors = {{"w", {times * 700}}, {"frozen", {times * 450}, 0, true}, {"b", {3}, 1}}},
      {.name = "frozen", .tensors = {{"w", {times * 333}, 0, true}}},
      {.name = "nothing", .tensors = {{"w", {0}}}},
      {.name = "norm", .dtype = DType::fp32, .tensors = {{"w", {5}, 1}}},
      {.name = "head", .tensors = {{"b", {29}, 1}}, .ties = {{"weight", 0, 0}}},
  }};
}

inline Model plain_model(std::size_t units, std::size_t elements = 300) {
  Model model;
  for (std::size_t i = 0; i < units; ++i) {
    model.units.push_back({.name = "h." + std::to_string(i), .tensors = {{"weight", {elements}}}});
  }
  return model;
}

// Matrices alone: of two groups, one with equal blocks, one of a transposed shape, and one frozen; and a unit that is tied.
inline Model matrix_model() {
  return {{
      {.name = "h.0",
       .tensors = {{"qkv", {16, 32}, 0, false, true, {}, {8, 4, 4}},
                   {"frozen", {450}, 0, true},
                   {"up", {20, 24}},
                   {"down", {24, 20}, 1}}},
      {.name = "h.1", .dtype = DType::fp32, .tensors = {{"w", {7, 9}}}},
      {.name = "nothing", .tensors = {{"w", {0, 4}}}},
      {.name = "h.2", .tensors = {{"w", {30, 29}}}, .ties = {{"up", 0, 2}}},
  }};
}

// The order of PyTorch in stage 3: backward uses each unit first for its parameters, and then with its gradients.
inline Trace order_in_torch(const Model& model) {
  Trace trace;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    std::ranges::copy(visits_of(model, unit, Phase::forward), std::back_inserter(trace));
  }
  for (std::size_t unit = model.units.size(); unit-- > 0;) {
    std::ranges::copy(visits_of(model, unit, Phase::forward), std::back_inserter(trace));
    std::ranges::copy(visits_of(model, unit, Phase::backward), std::back_inserter(trace));
  }
  return trace;
}

inline bool has_matrices(const Model& model) { return !model.units[0].tensors[0].blocks.empty(); }

// Sets up Muon for a model of matrices.
inline PlanSetup with_muon(PlanSetup setup) {
  setup.orthogonalization_steps = 5;
  return setup;
}

}  // namespace ballast::testing

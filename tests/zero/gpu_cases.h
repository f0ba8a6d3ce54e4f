// Checks of lanes that work on a GPU, for tests on a real and on an emulated one.
#pragma once

#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "kernels/runtime/buffer.h"
#include "tests/sanitizer.h"
#include "tests/zero/training_rig.h"
#include "zero/plan/compiled_plan.h"

namespace ballast::testing {

// Returns steps that use units in another order, leave some out or use some twice; then an order that repeats.
inline std::vector<std::vector<Trace>> off_plan_steps() {
  constexpr auto f = Phase::forward, b = Phase::backward;
  const Trace mixed{{0, f}, {2, f}, {1, f}, {1, f}, {5, f}, {5, b}, {1, b}, {1, b}};
  const Trace plain{{5, f}, {1, f}, {4, f}, {4, b}, {5, b}};
  return {{mixed, plain}, {plain, mixed}, {plain}, {plain}, {plain}};
}

inline void check_gpu_trains_as_cpu(Sweep& sweep, std::size_t ranks, const Setup& with) {
  Setup on_cpu = with;
  on_cpu.placement = placement_of_stage(0, ranks);
  const std::vector<Outcome> expected = train(on_cpu);
  for (const Placement& placement : placements(ranks)) {
    if (!sweep.takes_next()) continue;
    CAPTURE(ranks, placement.shards, placement.full_parameters, placement.parameters.fractions(),
            placement.gradients.fractions(), placement.state.fractions());
    Setup setup = with;
    setup.placement = placement;
    setup.gpu = true;
    const std::vector<Outcome> outcomes = train(setup);
    check_same(expected, outcomes);
    if (with.uses_by_step.empty() && !with.offloads) check_as_planned(outcomes);
  }
}

inline void check_gpu_trains_as_cpu() {
  Sweep sweep(3);
  for (const std::size_t ranks : {1u, 2u}) {
    check_gpu_trains_as_cpu(sweep, ranks, {.micro_steps = 2, .max_norm = 0.05});
    check_gpu_trains_as_cpu(sweep, ranks, {.schedule = {.prefetch = 2, .kept_records = 2, .update_in_backward = true}});
    check_gpu_trains_as_cpu(sweep, ranks, {.poisoned_step = 1});
    check_gpu_trains_as_cpu(sweep, ranks, {.micro_steps = 2, .keeps_run = true});
    check_gpu_trains_as_cpu(sweep, ranks, {.uses_by_step = off_plan_steps()});
    check_gpu_trains_as_cpu(sweep, ranks, {.micro_steps = 2, .verify = 1, .offloads = true});
    check_gpu_trains_as_cpu(sweep, ranks,
                            {.micro_steps = 2, .schedule = {.kept_records = 2}, .uses_by_step = off_plan_steps()});
  }
}

inline void check_gpu_trains_in_all_formats() {
  Sweep sweep(3);
  for (const auto format : all_state_formats) {
    CAPTURE(name(format));
    check_gpu_trains_as_cpu(sweep, 2, {.format = format});
  }
}

// Stands in for torch's allocator: GPU memory that another library manages.
class GpuAllocator final : public Allocator {
 public:
  std::byte* allocate(std::size_t bytes) override {
    given += bytes;
    return device::allocate(bytes, 0, "the allocator's user");
  }
  void release(std::byte* memory, std::size_t bytes) noexcept override {
    given -= bytes;
    device::release(memory);
  }
  std::size_t given = 0;
};

inline void check_gpu_work_is_accounted_for() {
  const Model model = odd_model();
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const Stream stream;
  GpuAllocator allocator;
  {
    Training training(model, *world, {optim::AdamW{}, optim::AdamW{}},
                      {.state = {0.5, 0.5, 0.0},
                       .tile_elements = 256,
                       .keeps_timeline = true,
                       .gpu = 0,
                       .stream = stream.handle(),
                       .allocator = &allocator});
    CHECK(allocator.given == bytes_in(training.ledger(), Tier::device));
    training.initialise(initial_parameters());
    SyntheticTrainer trainer(model, 0, &stream);
    for (std::size_t step = 0; step < 2; ++step) {
      trainer.run(training, step);
      training.step();
    }
    training.offload();
    CHECK(allocator.given == 0);
    training.reload();
    CHECK(allocator.given == bytes_in(training.ledger(), Tier::device));
    const Metrics metrics = training.metrics();
    const std::string trace = training.chrome_trace();
    for (const Lane lane : {Lane::reduce, Lane::download, Lane::update, Lane::host, Lane::upload}) {
      CAPTURE(name(lane));
      CHECK(metrics.busy[static_cast<std::size_t>(lane)] > 0.0);
      CHECK(metrics.busy[static_cast<std::size_t>(lane)] <= metrics.seconds);
      CHECK_THAT(trace, Catch::Contains(fmt::format("\"name\":\"{}\"", name(lane))));
    }
    CHECK(metrics.exposed[static_cast<std::size_t>(Phase::step)] > 0.0);
    CHECK(metrics.exposed[static_cast<std::size_t>(Phase::step)] <= metrics.seconds);
  }
  CHECK(allocator.given == 0);
}

// The owner's stream writes full parameters late; visit_state(), which reads them in another stream, must wait for it.
inline void check_trainer_is_waited_for() {
  const Model model = odd_model();
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const Stream stream;
  MemoryAccounts accounts;
  const Buffer work = allocate(accounts, {.kind = MemoryKind::device, .bytes = std::size_t{32} << 20, .owner = "work"});
  Training training(model, *world, {optim::AdamW{}, optim::AdamW{}}, {.gpu = 0, .stream = stream.handle()});
  training.initialise(initial_parameters());
  for (int piece = 0; piece < 32; ++piece) {
    fill(work.data(), 1, work.bytes(), stream);
  }
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    if (training.plan().compiled().layout().units[unit].elements() == 0) continue;
    const View whole = training.full_parameters(unit);
    fill(whole.data(), 0, whole.bytes(), stream);
  }
  training.visit_state([&](const LocalTile& tile) {
    const std::size_t bytes = tile.memory.count * byte_size(model.units[tile.unit].dtype);
    const std::span seen(tile.memory.parameter, bytes);
    CHECK(std::ranges::all_of(seen, [](std::byte byte) { return byte == std::byte{0}; }));
  });
}

// The sums of tensors are computed in the memory of the sum of all, in a stream that is late.
inline void check_gpu_norms_of_tensors() {
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const Stream stream;
  const std::vector<optim::Rule> rules{optim::AdamW{}, optim::AdamW{}};
  for (const double on_host : {0.0, 0.5}) {
    TrainingOptions options{.gradients = {1.0 - on_host, on_host, 0.0}, .tile_elements = 256};
    Training on_cpu(odd_model(), *world, rules, options);
    options.gpu = 0;
    options.stream = stream.handle();
    Training on_gpu(odd_model(), *world, rules, options);
    SyntheticTrainer of_cpu(on_cpu.model(), 0), of_gpu(on_gpu.model(), 0, &stream);
    for (Training* training : {&on_cpu, &on_gpu})
      training->initialise(initial_parameters());
    for (std::size_t step = 0; step < 3; ++step) {
      of_cpu.run(on_cpu, step);
      of_gpu.run(on_gpu, step);
      const double norm = on_cpu.gradient_norm();
      const auto norms = on_gpu.tensor_norms();
      CHECK(norms == on_cpu.tensor_norms());
      CHECK(on_gpu.tensor_norms() == norms);
      CHECK(on_gpu.step().norm == norm);
      on_cpu.step();
    }
  }
}

}  // namespace ballast::testing

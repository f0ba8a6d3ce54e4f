// Checks of lanes that work on a GPU, for tests on a real and on an emulated one.
#pragma once

#include <fmt/format.h>

#include <catch2/catch.hpp>

#include "kernels/runtime/buffer.h"
#include "kernels/state_access.h"
#include "tests/sanitizer.h"
#include "tests/temporary_directory.h"
#include "tests/zero/training_rig.h"
#include "zero/plan/compile.h"

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
    setup.gpu = 0;  // all ranks use this GPU
    const std::vector<Outcome> outcomes = train(setup);
    check_same(expected, outcomes);
    if (with.uses_by_step.empty() && !with.offloads) check_as_planned(outcomes);
  }
}

inline void check_gpu_trains_as_cpu() {
  Sweep sweep(7);
  for (const std::size_t ranks : {1u, 2u}) {
    check_gpu_trains_as_cpu(sweep, ranks, {.micro_steps = 2, .max_norm = 0.05});
    check_gpu_trains_as_cpu(sweep, ranks, {.schedule = {.prefetch = 2, .kept_records = 2, .update_in_backward = true}});
    check_gpu_trains_as_cpu(sweep, ranks, {.poisoned_step = 1});
    check_gpu_trains_as_cpu(sweep, ranks, {.rates = {1, 1, 3, 0.1, 1}, .max_norm = 0.05});  // gathers from the host
    check_gpu_trains_as_cpu(sweep, ranks, {.micro_steps = 2, .keeps_run = true});
    check_gpu_trains_as_cpu(sweep, ranks, {.schedule = {.most_repeats = 1}, .max_norm = 0.05, .keeps_run = true});
    check_gpu_trains_as_cpu(sweep, ranks, {.uses_by_step = off_plan_steps()});
    check_gpu_trains_as_cpu(
        sweep, ranks,
        {.schedule = {.most_repeats = 1}, .uses_by_step = off_plan_steps(), .poisoned_step = 2, .keeps_run = true});
    check_gpu_trains_as_cpu(sweep, ranks, {.micro_steps = 2, .verify = 1, .offloads = true});
    check_gpu_trains_as_cpu(sweep, ranks,
                            {.micro_steps = 2, .schedule = {.kept_records = 2}, .uses_by_step = off_plan_steps()});
    // Units of more tiles than are updated at once.
    check_gpu_trains_as_cpu(sweep, ranks, {.model_times = 6, .tile_elements = 128, .max_norm = 0.05, .verify = 1});
    check_gpu_trains_as_cpu(sweep, ranks, {.model_times = 6, .tile_elements = 128, .micro_steps = 2});
    check_gpu_trains_as_cpu(sweep, ranks, {.model_times = 6, .tile_elements = 128, .poisoned_step = 1});
  }
}

inline void check_gpu_trains_in_all_formats() {
  Sweep sweep(7);
  for (const auto format : all_state_formats) {
    CAPTURE(name(format));
    check_gpu_trains_as_cpu(sweep, 2, {.format = format});
  }
}

// Trains with updates by the host alone, and by both or by the GPU where that is faster. Returns how many trainings had updates by
// both.
inline std::size_t check_shared_updates(const std::vector<Outcome>& expected, Setup setup) {
  std::size_t both = 0;
  setup.gpu = 0;
  for (const double host_memory : {0.0, 3.0, 1e-3}) {
    CAPTURE(host_memory, setup.placement.parameters.fractions(), setup.placement.gradients.fractions());
    setup.rates = {.upload = 1, .download = 1, .host_memory = host_memory};
    const std::vector<Outcome> outcomes = train(setup);
    check_same(expected, outcomes);
    if (!setup.offloads && setup.uses_by_step.empty()) check_as_planned(outcomes);
    const auto& moved = outcomes[0].planned_moves;
    const bool gpu_updates = moved[static_cast<std::size_t>(Lane::update)] > 0;
    const bool host_works = moved[static_cast<std::size_t>(Lane::host)] > 0;
    if (host_memory == 0.0) CHECK(!gpu_updates);
    if (host_memory == 1e-3 && setup.placement.gradients == Spread(Tier::device)) CHECK(gpu_updates);
    if (gpu_updates && host_works) ++both;
  }
  return both;
}

inline void check_gpu_and_host_share_updates() {
  std::size_t both = 0;
  for (const auto format : all_state_formats) {
    CAPTURE(name(format));
    Setup setup{.placement = placement_of_stage(0, 1), .tile_elements = 128, .format = format};
    const std::vector<Outcome> expected = train(setup);
    for (const Tier parameters : {Tier::device, Tier::host}) {
      for (const Tier gradients : {Tier::device, Tier::host}) {
        setup.placement = placement_of_stage(3, 1);
        setup.placement.parameters = parameters;
        setup.placement.gradients = gradients;
        setup.placement.state = Tier::host;
        both += check_shared_updates(expected, setup);
      }
    }
  }
  for (Setup setup : {Setup{.micro_steps = 2, .max_norm = 0.05}, Setup{.poisoned_step = 1, .verify = 1},
                      Setup{.schedule = {.update_in_backward = true}}, Setup{.uses_by_step = off_plan_steps()},
                      Setup{.offloads = true, .looks = true}}) {
    setup.tile_elements = 128;
    setup.placement = placement_of_stage(0, 2);
    const std::vector<Outcome> expected = train(setup);
    setup.placement = placement_of_stage(2, 2);
    setup.placement.state = Tier::host;
    both += check_shared_updates(expected, setup);
  }
  CHECK(both > 15);
}

inline void check_gpu_keeps_gradients_in_bf16() {
  Sweep sweep(7);
  const auto bf16 = GradientFormat::bf16;
  for (const std::size_t ranks : {1u, 2u}) {
    check_gpu_trains_as_cpu(sweep, ranks, {.micro_steps = 3, .gradient_format = bf16, .max_norm = 0.05});
    check_gpu_trains_as_cpu(sweep, ranks, {.gradient_format = bf16, .uses_by_step = off_plan_steps()});
    check_gpu_trains_as_cpu(sweep, ranks, {.micro_steps = 2, .gradient_format = bf16, .poisoned_step = 1, .verify = 1});
  }
  check_gpu_trains_as_cpu(sweep, 2, {.schedule = {.update_in_backward = true}, .gradient_format = bf16});
}

inline void check_gpu_encodes_as_cpu() {
  Sweep sweep(2);
  for (const Wire& wire :
       {Wire{.reduce = WireFormat::int8}, Wire{.gather = WireFormat::int8, .reduce = WireFormat::int4}}) {
    const Placement on_device = placement_of_stage(3, 2);
    const std::vector<Outcome> expected = train({.placement = on_device, .micro_steps = 2, .wire = wire});
    for (const Placement& placement : placements(2)) {
      if (placement.shards == 1 || (placement.full_parameters && wire.gather != WireFormat::exact)) continue;
      if (!sweep.takes_next()) continue;
      CAPTURE(placement.full_parameters, placement.parameters.fractions(), placement.state.fractions());
      const Setup setup{.placement = placement, .micro_steps = 2, .wire = wire, .gpu = 0};
      const std::vector<Outcome> outcomes = train(setup);
      check_same(expected, outcomes);
      check_as_planned(outcomes);
    }
  }
  Setup stage_0{.placement = placement_of_stage(0, 3),
                .wire = {.reduce = WireFormat::int8, .across = WireFormat::int4}};
  const std::vector<Outcome> expected = train(stage_0);
  stage_0.gpu = 0;
  check_same(expected, train(stage_0));
}

// Tiles as large as a shard are read and changed in stretches.
inline void check_large_tiles_are_read_in_stretches() {
  const Model model = plain_model(1, (std::size_t{5} << 18) + 128);
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const Stream stream;
  for (const auto format : {StateFormat::split, StateFormat::compact, StateFormat::four_bit}) {
    if (sanitized && format != StateFormat::split) continue;  // this takes minutes
    CAPTURE(name(format));
    std::vector<std::vector<float>> moments, parameters;
    for (const bool gpu : {false, true}) {
      TrainingOptions options{.format = format, .threads = 1};
      if (gpu) options.gpu = 0, options.stream = stream.handle();
      Training training(model, *world, {optim::AdamW{}}, options);
      training.initialize(initial_parameters());
      SyntheticTrainer trainer(model, 0, gpu ? &stream : nullptr);
      const auto step = [&](std::size_t number) {
        trainer.run(training, number);
        training.step();
      };
      step(0);
      std::size_t stretches = 0;
      TrainingState(training).change([&](const LocalTile& tile) {
        ++stretches;
        std::vector<float> values(tile.memory.count);
        kernels::read_moment(tile.memory, Moment::momentum, values);
        std::ranges::transform(values, values.begin(), [](float value) { return 2.0f * value; });
        kernels::write_moment(tile.memory, Moment::momentum, values);
      });
      CHECK(stretches == 2);
      step(1);
      std::vector<float>& all = moments.emplace_back();
      std::vector<float>& masters = parameters.emplace_back();
      TrainingState(training).visit([&](const LocalTile& tile) {
        CHECK(tile.range.first == all.size());
        all.resize(all.size() + tile.memory.count);
        kernels::read_moment(tile.memory, Moment::momentum, std::span(all).last(tile.memory.count));
        const auto* const values = reinterpret_cast<const bf16*>(tile.memory.parameter);
        std::transform(values, values + tile.memory.count, std::back_inserter(masters),
                       [](bf16 value) { return static_cast<float>(value.bits); });
      });
    }
    CHECK((moments[0] == moments[1]));  // the moments are too many to print
    CHECK((parameters[0] == parameters[1]));
  }
}

// The norm of a tensor is that of the gradients that are updated, wherever their squares were added.
inline void check_norms_of_tensors() {
  const Model model = odd_model();
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const Stream stream;
  std::vector<std::vector<std::vector<double>>> norms;
  for (const bool gpu : {false, true}) {
    TrainingOptions options{.gradients = Tier::host, .state = Tier::host, .tile_elements = 256, .threads = 1};
    if (gpu) options.gpu = 0, options.stream = stream.handle();
    Training training(model, *world, {optim::AdamW{}, optim::AdamW{}}, options);
    training.initialize(initial_parameters());
    SyntheticTrainer trainer(model, 0, gpu ? &stream : nullptr);
    trainer.run(training, 0);
    norms.push_back(TrainingState(training).tensor_norms());
    norms.push_back({{training.step().norm}});
  }
  CHECK(norms[0][0][0] > 0.0);
  CHECK(norms[0] == norms[2]);
  CHECK(norms[1] == norms[3]);
  Setup poisoned{.placement = placement_of_stage(3, 2), .poisoned_step = 1};  // the wrong gradient is named
  poisoned.placement.gradients = poisoned.placement.state = Tier::host;
  const std::vector<Outcome> expected = train(poisoned);
  poisoned.gpu = 0;
  check_same(expected, train(poisoned));
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
                       .rates = {.upload = 1, .download = 1, .host_memory = 3},  // both processors update
                       .keeps_timeline = true,
                       .gpu = 0,
                       .stream = stream.handle(),
                       .allocator = &allocator});
    CHECK(allocator.given + TrainingState(training).unreserved_bytes() == bytes_in(training.ledger(), Tier::device));
    training.initialize(initial_parameters());
    CHECK(allocator.given == bytes_in(training.ledger(), Tier::device));
    SyntheticTrainer trainer(model, 0, &stream);
    for (std::size_t step = 0; step < 2; ++step) {
      trainer.run(training, step);
      training.step();
    }
    TrainingState(training).offload();
    CHECK(allocator.given == 0);
    TrainingState(training).reload();
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

// The owner's stream writes full parameters late; TrainingState::visit(), which reads them in another stream, must wait for it.
inline void check_trainer_is_waited_for() {
  const Model model = odd_model();
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const Stream stream;
  MemoryAccounts accounts;
  const Buffer work = allocate(accounts, {.kind = MemoryKind::device, .bytes = std::size_t{32} << 20, .owner = "work"});
  Training training(model, *world, {optim::AdamW{}, optim::AdamW{}}, {.gpu = 0, .stream = stream.handle()});
  training.initialize(initial_parameters());
  for (int piece = 0; piece < 32; ++piece) {
    fill(work.data(), 1, work.bytes(), stream);
  }
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    if (compiled(training.plan()).layout().units[unit].elements() == 0) continue;
    const View whole = TrainingState(training).full_parameters(unit);
    fill(whole.data(), 0, whole.bytes(), stream);
  }
  TrainingState(training).visit([&](const LocalTile& tile) {
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
      training->initialize(initial_parameters());
    for (std::size_t step = 0; step < 3; ++step) {
      of_cpu.run(on_cpu, step);
      of_gpu.run(on_gpu, step);
      const double norm = on_cpu.gradient_norm();
      const auto norms = TrainingState(on_gpu).tensor_norms();
      CHECK(norms == TrainingState(on_cpu).tensor_norms());
      CHECK(TrainingState(on_gpu).tensor_norms() == norms);
      CHECK(on_gpu.step().norm == norm);
      on_cpu.step();
    }
  }
}

// A checkpoint goes from the CPU to the GPU and back, with a step on each.
inline void check_checkpoints_move_to_gpu_and_back() {
  const Model model = plain_model(2, 3000);
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const Stream stream;
  std::vector<std::vector<std::byte>> seen;
  for (const bool moves : {false, true}) {
    const TemporaryDirectory directory;
    for (std::size_t step = 0; step < 3; ++step) {
      const bool gpu = moves && step == 1;
      TrainingOptions options{.tile_elements = 256, .threads = 1};
      if (gpu) options.gpu = 0, options.stream = stream.handle();
      Training training(model, *world, {optim::AdamW{}}, options);
      training.initialize(initial_parameters());
      if (step > 0) CHECK(training.load(directory.path()));
      CHECK(training.steps() == step);
      SyntheticTrainer trainer(model, 0, gpu ? &stream : nullptr);
      const auto bytes = trainer.run(training, step);
      if (step == 2) seen.push_back(bytes);
      training.step();
      training.save(directory.path());
    }
  }
  CHECK(seen[0] == seen[1]);
}

}  // namespace ballast::testing

#include "tests/zero/training_rig.h"

#include <unistd.h>

#include <catch2/catch.hpp>
#include <thread>

#include "tests/temporary_directory.h"
#include "zero/plan/compile.h"
#include "zero/plan/program_cost.h"

namespace ballast::testing {
namespace {

struct Tiers {
  Tier parameters, gradients, state;
};

std::size_t ranks_of(const Setup& setup) { return setup.placement.ranks(); }

std::filesystem::path directory_of(const Setup& setup, std::size_t rank) {
  const std::filesystem::path directory = setup.mirrors ? setup.directory / std::to_string(rank) : setup.directory;
  if (setup.mirrors) std::filesystem::create_directories(directory);
  return directory;
}

TrainingOptions options_of(const Setup& setup, std::size_t rank, const Stream* stream) {
  const Placement& placement = setup.placement;
  const bool stage_0 = placement.shards == 1 && placement.full_parameters;
  return {.stage = stage_0                     ? 0
                   : placement.full_parameters ? 2
                                               : 3,
          .replicas = stage_0 ? 1 : placement.replicas,
          .parameter_replicas = placement.parameter_replicas,
          .parameters = placement.parameters,
          .gradients = placement.gradients,
          .state = placement.state,
          .reduction = placement.reduction,
          .drives = {.directories = {directory_of(setup, rank)},
                     .run = setup.keeps_run && placement.state == Tier::nvme ? "test" : "",
                     .mirror = setup.mirrors,
                     .depth = 4},
          .format = setup.format,
          .gradient_format = setup.gradient_format,
          .tile_elements = setup.tile_elements,
          .micro_steps = setup.micro_steps,
          .trace = setup.trace,
          .schedule = setup.schedule,
          .rates = setup.rates,
          .wire = setup.wire,
          .max_norm = setup.max_norm,
          .verify = setup.verify,
          .threads = 1,  // TBB's threads are not seen by ThreadSanitizer
          .gpu = stream != nullptr ? std::optional(stream->gpu()) : std::nullopt,
          .stream = stream != nullptr ? stream->handle() : nullptr};
}

std::vector<optim::Rule> rules_of(const Setup& setup) {
  if (!setup.muon) return {optim::AdamW{.lr = 0.02}, optim::AdamW{.lr = 0.01, .weight_decay = 0.0}};
  return {optim::Muon{.lr = 0.02}, optim::Muon{.lr = 0.01,
                                               .momentum = 0.9,
                                               .nesterov = false,
                                               .weight_decay = 0.0,
                                               .ns_steps = 4,
                                               .adjust_lr_fn = optim::AdjustLr::match_rms_adamw,
                                               .orthogonalization = optim::Orthogonalization::polar_express}};
}

std::vector<Trace> uses_of_step(const Setup& setup, const Model& model, std::size_t step) {
  if (setup.uses_by_step.empty()) return std::vector<Trace>(setup.micro_steps, plain_order(model));
  return setup.uses_by_step[step % setup.uses_by_step.size()];
}

std::size_t planned_bytes(const Training& training) {
  const Ledger ledger = training.ledger();
  return bytes_in(ledger, Tier::device) + bytes_in(ledger, Tier::host);
}

std::size_t bytes_on_device(const Training& training) {
  std::size_t bytes = 0;
  for (const MemoryAccounts::Entry& entry : training.memory().entries())
    bytes += entry.kind == MemoryKind::device ? entry.usage.now : 0;
  return bytes;
}

void offload_and_reload(Training& training, const Stream* stream) {
  const std::size_t before = bytes_on_device(training);
  { const Lease evaluated = training.forward(0); }
  TrainingState(training).offload();
  if (bytes_on_device(training) > 0) throw std::logic_error("memory stayed on the device");
  TrainingState(training).reload();
  if (bytes_on_device(training) != before) throw std::logic_error("other bytes are on the device");
  if (stream != nullptr) stream->synchronize();
}

void keep_gathered(Training& training, std::size_t bytes) {
  { const Lease evaluated = training.forward(0); }
  TrainingState(training).keep_gathered(bytes);
}

void count_moves(const Training& training, std::size_t steps, Outcome& outcome) {
  const Program& program = compiled(training.plan()).program();
  const auto count = [&](const std::vector<Op>& ops, std::size_t times) {
    for (const Op& op : ops) {
      outcome.planned_moves[static_cast<std::size_t>(op.lane)] += times * bytes_moved(op, training.plan().placement());
    }
  };
  count(program.entry, 1);
  count(program.ops, steps);
}

}  // namespace

Outcome train_rank(const Setup& setup, Communicator& world) {
  const Model model = setup.muon ? matrix_model() : odd_model(setup.model_times);
  std::optional<Stream> own_stream;
  if (setup.gpu) own_stream.emplace(*setup.gpu);
  const Stream* const stream = own_stream ? &*own_stream : nullptr;
  Training training(model, world, rules_of(setup), options_of(setup, world.rank(), stream));
  training.start(initial_parameters());
  SyntheticTrainer trainer(model, world.rank(), stream);
  Outcome outcome{.began_at = training.steps(), .first_planned_bytes = planned_bytes(training)};
  for (std::size_t step = training.steps(); step < setup.steps; ++step) {
    trainer.poison = step == setup.poisoned_step && world.rank() == 0 ? std::numeric_limits<float>::infinity() : 0.0f;
    const std::vector<Trace> uses = uses_of_step(setup, model, step);
    for (std::size_t micro = 0; micro < uses.size(); ++micro) {
      outcome.seen.push_back(trainer.run(training, uses[micro], step * uses.size() + micro));
    }
    // A program for a trace may have all uses of a step as those of one micro-step.
    const std::size_t micro_steps = setup.trace.empty() ? uses.size() : setup.micro_steps;
    const StepResult result = setup.schedule.update_in_backward
                                  ? training.step(setup.loss_scale)
                                  : training.step({.loss_scale = setup.loss_scale, .micro_steps = micro_steps});
    if (world.rank() == 0 && setup.progress >= 0 && ::write(setup.progress, "s", 1) != 1) return outcome;
    if (setup.offloads) offload_and_reload(training, stream);
    if (setup.looks) TrainingState(training).visit([](const LocalTile&) {});
    if (setup.regathers) keep_gathered(training, training.steps() % 2 == 1 ? SIZE_MAX : 0);
    outcome.norms.push_back(result.norm);
    outcome.on_demand.push_back(result.metrics.on_demand);
    outcome.reasons.push_back(result.reason);
  }
  training.finish();
  count_moves(training, setup.steps - outcome.began_at, outcome);
  outcome.verified = training.metrics().verified;
  outcome.repeated = training.metrics().repeated;
  outcome.moved_bytes = training.metrics().bytes;
  outcome.sent_bytes = training.metrics().sent_inside + training.metrics().sent_across;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    add_bytes(model.units[unit], training.forward(unit), stream, outcome.parameters);
  }
  outcome.steps = training.steps();
  for (const MemoryAccounts::Entry& entry : training.memory().entries())
    outcome.reserved_bytes += entry.usage.peak;
  outcome.planned_bytes = planned_bytes(training);
  return outcome;
}

std::vector<Outcome> train(const Setup& setup) {
  std::optional<TemporaryDirectory> directory;  // a killed process leaves it behind, so it is made only if needed
  Setup placed = setup;
  placed.keeps_run = setup.keeps_run || !setup.directory.empty();
  if (placed.directory.empty()) placed.directory = directory.emplace().path();
  ThreadGroup group(ranks_of(setup), std::chrono::seconds(60), setup.ranks_per_host);
  std::vector<Outcome> outcomes(group.size());
  std::vector<std::string> failures(group.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto backend = kernels::cpu_backend({.threads = 1});
        outcomes[rank] = train_rank(placed, *thread_communicator(group, rank, *backend));
      } catch (const std::exception& failure) {
        failures[rank] = failure.what();
        group.abort(failure.what());
      }
    });
  }
  for (std::thread& thread : threads)
    thread.join();
  REQUIRE(failures == std::vector<std::string>(group.size()));
  return outcomes;
}

std::vector<std::string> failures_of_ranks(std::size_t ranks, const std::function<void(Communicator& world)>& train,
                                           std::chrono::seconds timeout) {
  ThreadGroup group(ranks, timeout);
  std::vector<std::string> failures(ranks);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto backend = kernels::cpu_backend({.threads = 1});
        train(*thread_communicator(group, rank, *backend));
      } catch (const std::exception& failure) {
        failures[rank] = failure.what();
      }
    });
  }
  for (std::thread& thread : threads)
    thread.join();
  return failures;
}

void check_same(const std::vector<Outcome>& one, const std::vector<Outcome>& other) {
  REQUIRE(one.size() == other.size());
  for (std::size_t rank = 0; rank < one.size(); ++rank) {
    CHECK((one[rank].seen == other[rank].seen));
    CHECK(one[rank].norms == other[rank].norms);
    CHECK((one[rank].parameters == other[rank].parameters));
    CHECK(one[rank].steps == other[rank].steps);
  }
}

void check_as_planned(const std::vector<Outcome>& outcomes) {
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.reserved_bytes == outcome.planned_bytes);
    if (outcome.repeated > 0) continue;  // updates that were made again moved more
    for (std::size_t lane = 0; lane < lane_count; ++lane) {
      INFO("lane " << name(static_cast<Lane>(lane)));
      CHECK(outcome.moved_bytes[lane] == outcome.planned_moves[lane]);
    }
  }
}

std::vector<Placement> placements(std::size_t ranks) {
  using enum Tier;
  std::vector<Placement> all;
  for (const int stage : {0, 1, 2, 3}) {
    for (const Tiers& tiers : {Tiers{device, device, device}, Tiers{device, device, host}, Tiers{device, host, nvme},
                               Tiers{host, device, host}, Tiers{host, host, nvme}, Tiers{nvme, host, nvme}}) {
      if (stage < 3 && tiers.parameters != device) continue;
      Placement placement = placement_of_stage(stage, ranks);
      placement.parameters = Spread(tiers.parameters);
      placement.gradients = Spread(tiers.gradients);
      placement.state = Spread(tiers.state);
      all.push_back(placement);
    }
  }
  Placement mixed = placement_of_stage(3, ranks);
  mixed.parameters = {0.4, 0.3, 0.3};
  mixed.gradients = {0.5, 0.5, 0.0};
  mixed.state = {0.3, 0.3, 0.4};
  all.push_back(mixed);
  return all;
}

}  // namespace ballast::testing

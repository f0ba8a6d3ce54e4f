#include "tests/zero/training.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <thread>

namespace ballast::testing {
namespace {

PlanOptions options_of(const Training& training, std::size_t rank) {
  return {.placement = training.placement,
          .rank = rank,
          .tile_elements = training.tile_elements,
          .micro_steps = training.micro_steps,
          .format = training.format,
          .names = optim::AdamW::state,
          .schedule = training.schedule};
}

}  // namespace

Rank::Rank(const Training& training, Communicator& world, const std::filesystem::path& directory, bool resumes)
    : training_(training),
      rank_(world.rank()),
      plan_(training.model, options_of(training, world.rank())),
      backend_(kernels::cpu_backend({.threads = 1})),
      queue_(offload::open_queue({.depth = 4})),
      drive_{directory, queue_.get()},
      mesh_(make_mesh(world, training.placement)),
      trainer_(training.model, world.rank()),
      rules_{optim::AdamW{.lr = 0.02}, optim::AdamW{.lr = 0.01, .weight_decay = 0.0}} {
  if (plan_.tiles_on_drive() > 0) {
    const auto shape = plan_.blocks().shape(1 + rank_, plan_.tiles_on_drive());
    const offload::StoreOptions options{.name = "rank-" + std::to_string(rank_)};
    records_.emplace(resumes ? offload::RecordStore::open(shape, {&drive_, 1}, options)
                             : offload::RecordStore::create(shape, {&drive_, 1}, options));
  }
  engine_.emplace(EngineParts{.plan = plan_,
                              .mesh = mesh_,
                              .backend = *backend_,
                              .accounts = accounts_,
                              .records = records_ ? &*records_ : nullptr,
                              .queues = {queue_.get()}});
  resumes ? engine_->resume(first_parameters()) : engine_->initialise(first_parameters());
}

void Rank::take_step(std::size_t step, Outcome& outcome) {
  const StepOptions options{.groups = rules_, .max_norm = training_.max_norm, .loss_scale = 4.0};
  const bool in_backward = training_.schedule.update_in_backward;
  if (in_backward) engine_->prepare(options);
  trainer_.poison = step == training_.poisoned_step && rank_ == 0 ? std::numeric_limits<float>::infinity() : 0.0f;
  for (std::size_t micro = 0; micro < training_.micro_steps; ++micro) {
    outcome.seen.push_back(trainer_.run(*engine_, step * training_.micro_steps + micro));
  }
  const StepResult result = in_backward ? engine_->step() : engine_->step(options);
  outcome.norms.push_back(result.norm);
  outcome.reasons.push_back(result.reason);
}

Outcome Rank::train() {
  Outcome outcome;
  const std::size_t first = engine_->steps();
  for (std::size_t step = first; step < training_.steps; ++step) {
    take_step(step, outcome);
  }
  engine_->finish();
  for (const Op& op : plan_.program().ops) {
    outcome.planned_moves[static_cast<std::size_t>(op.lane)] +=
        bytes_moved(op, training_.placement) * (training_.steps - first);
  }
  for (const Op& op : plan_.program().entry) {
    outcome.planned_moves[static_cast<std::size_t>(op.lane)] += bytes_moved(op, training_.placement);
  }
  for (std::size_t lane = 0; lane < lane_count; ++lane)
    outcome.moved_bytes[lane] = engine_->lanes()[lane].bytes;
  for (std::size_t unit = 0; unit < training_.model.units.size(); ++unit) {
    add_bytes(training_.model.units[unit], engine_->forward(unit), outcome.parameters);
  }
  outcome.steps = engine_->steps();
  for (const MemoryAccounts::Entry& entry : accounts_.entries())
    outcome.reserved_bytes += entry.usage.peak;
  for (const Slot& slot : plan_.program().slots)
    outcome.planned_bytes += slot.bytes;
  return outcome;
}

std::vector<Outcome> train(const Training& training) {
  const std::size_t ranks = training.placement.shards * training.placement.replicas;
  const TemporaryDirectory directory;
  ThreadGroup everybody(ranks);
  std::vector<Outcome> outcomes(ranks);
  std::vector<std::string> failures(ranks);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto backend = kernels::cpu_backend({.threads = 1});
        const auto world = thread_communicator(everybody, rank, *backend);
        outcomes[rank] = Rank(training, *world, directory.path()).train();
      } catch (const std::exception& failure) {
        failures[rank] = failure.what();
        everybody.abort(failure.what());
      }
    });
  }
  for (std::thread& thread : threads)
    thread.join();
  REQUIRE(failures == std::vector<std::string>(ranks));
  return outcomes;
}

}  // namespace ballast::testing

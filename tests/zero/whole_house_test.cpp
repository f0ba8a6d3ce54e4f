// Trains a small model on threads as ranks, through everything: model, layout, compile, program, engine, update, records on
// a drive. Whatever the stage and the tier, the bits are the same.
#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <optional>
#include <thread>

#include "tests/temporary_directory.h"
#include "tests/zero/tiny_trainer.h"
#include "zero/comm/thread_communicator.h"
#include "zero/compile.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

struct Setup {
  int stage = 0;
  std::size_t ranks = 2;
  Tier state = Tier::host;
  std::size_t tile_elements = 256;
  kernels::StateFormat format = kernels::StateFormat::split;
  std::size_t micro_steps = 1;
  double max_norm = optim::no_clipping;
};

struct Outcome {
  std::vector<float> losses{};
  std::vector<double> norms{};
  std::vector<std::uint16_t> parameters{};
  std::size_t reserved_bytes = 0;
  std::size_t planned_bytes = 0;
};

std::vector<std::vector<bf16>> first_parameters(const Model& model, const Layout& layout) {
  std::vector<std::vector<bf16>> units;
  for (std::size_t unit = 0; unit < layout.units.size(); ++unit) {
    std::vector<bf16>& values = units.emplace_back(layout.units[unit].elements);
    for (std::size_t tensor = 0; tensor < model.units[unit].tensors.size(); ++tensor) {
      for (std::size_t i = 0; i < model.units[unit].tensors[tensor].elements(); ++i) {
        const float value = 0.3f * std::sin(static_cast<float>(1 + i * 7 + tensor * 3 + unit));
        values[layout.units[unit].tensor_begin[tensor] + i].bits = static_cast<std::uint16_t>(kernels::to_bf16(value));
      }
    }
  }
  return units;
}

constexpr std::size_t steps = 5;

// One rank, from the model to the last step.
Outcome train_rank(const Setup& setup, std::size_t rank, ThreadGroup& everybody) {
  const Model model = tiny_model();
  const Placement placement = placement_of_stage(setup.stage, setup.ranks, setup.state);
  const Layout layout = make_layout(model, placement.shards, setup.tile_elements);
  const optim::StateLayout state({setup.format, DType::bf16, optim::AdamW::state}, setup.tile_elements);
  const bool sharded = placement.shards > 1;
  const Program program = compile({.model = model,
                                   .layout = layout,
                                   .placement = placement,
                                   .rank_in_shard_group = sharded ? rank : 0,
                                   .micro_steps = setup.micro_steps,
                                   .state_bytes_per_tile = state.bytes()});

  const auto backend = kernels::cpu_backend({.threads = 1});
  ThreadGroup alone(1);
  const auto self = thread_communicator(alone, 0, *backend);
  const auto all = thread_communicator(everybody, rank, *backend);
  MemoryAccounts accounts;
  const TemporaryDirectory directory;
  const auto queue = offload::open_queue({.depth = 2});
  const offload::Drive drive{directory.path(), queue.get()};
  std::optional<offload::RecordStore> records;
  if (setup.state == Tier::nvme) {
    std::size_t tiles = 0;
    for (const UnitLayout& unit : layout.units) {
      tiles += unit.tiles.size();
    }
    records.emplace(offload::RecordStore::create({1 + rank, tiles, state.bytes()}, {&drive, 1}));
  }
  Engine engine({model, layout, program, state, sharded ? *all : *self, sharded ? *self : *all, *backend, accounts,
                 records ? &*records : nullptr});

  std::vector<std::vector<bf16>> first = first_parameters(model, layout);
  std::vector<ConstView> units;
  for (std::vector<bf16>& unit : first) {
    units.push_back(View(std::span(unit)));
  }
  engine.initialise(units);
  const std::vector<optim::Rule> rules{optim::AdamW{.lr = 0.02}, optim::AdamW{.lr = 0.01, .weight_decay = 0.0}};
  Outcome outcome{.reserved_bytes = accounts.total(MemoryKind::pageable).now, .planned_bytes = memory_bytes(program)};
  TinyTrainer trainer(layout, rank, setup.ranks);
  for (std::size_t step = 0; step < steps; ++step) {
    for (std::size_t micro = 0; micro < setup.micro_steps; ++micro) {
      outcome.losses.push_back(trainer.run(engine, step * setup.micro_steps + micro));
    }
    outcome.norms.push_back(engine.step({.groups = rules, .max_norm = setup.max_norm}).norm);
  }
  for (std::size_t unit = 0; unit < unit_count; ++unit) {
    const auto values = engine.forward(unit).parameters.as<bf16>();
    for (std::size_t tensor = 0; tensor < model.units[unit].tensors.size(); ++tensor) {
      for (std::size_t i = 0; i < model.units[unit].tensors[tensor].elements(); ++i) {
        outcome.parameters.push_back(values[layout.units[unit].tensor_begin[tensor] + i].bits);
      }
    }
  }
  return outcome;
}

std::vector<Outcome> train(const Setup& setup) {
  ThreadGroup everybody(setup.ranks);
  std::vector<Outcome> outcomes(setup.ranks);
  std::vector<std::thread> threads;
  std::vector<std::string> failures(setup.ranks);
  for (std::size_t rank = 0; rank < setup.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        outcomes[rank] = train_rank(setup, rank, everybody);
      } catch (const std::exception& failure) {
        failures[rank] = failure.what();
        everybody.abort(failure.what());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  REQUIRE(failures == std::vector<std::string>(setup.ranks));
  return outcomes;
}

void check_same(const std::vector<Outcome>& one, const std::vector<Outcome>& other) {
  REQUIRE(one.size() == other.size());
  for (std::size_t rank = 0; rank < one.size(); ++rank) {
    CHECK(one[rank].losses == other[rank].losses);
    CHECK(one[rank].norms == other[rank].norms);
    CHECK(one[rank].parameters == other[rank].parameters);
  }
}

}  // namespace

TEST_CASE("the model learns, and its ranks agree") {
  const std::vector<Outcome> outcomes = train({});
  CHECK(outcomes[0].losses.back() < 0.5f * outcomes[0].losses.front());
  CHECK(outcomes[0].parameters == outcomes[1].parameters);
  CHECK(outcomes[0].norms == outcomes[1].norms);
}

TEST_CASE("stages and tiers are only different programs: the bits of a training do not change") {
  for (const std::size_t ranks : {1u, 2u, 3u}) {
    for (const std::size_t micro_steps : {1u, 3u}) {
      for (const double max_norm : {optim::no_clipping, 0.05}) {
        const auto reference = train({.ranks = ranks, .micro_steps = micro_steps, .max_norm = max_norm});
        for (const int stage : {0, 1, 2, 3}) {
          for (const Tier tier : {Tier::host, Tier::nvme}) {
            for (const std::size_t tile : {128u, 512u, 100'096u}) {
              CAPTURE(ranks, micro_steps, max_norm, stage, static_cast<int>(tier), tile);
              check_same(reference, train({.stage = stage,
                                           .ranks = ranks,
                                           .state = tier,
                                           .tile_elements = tile,
                                           .micro_steps = micro_steps,
                                           .max_norm = max_norm}));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("the split format trains with the bits of fp32, and the rounding formats do not depend on stage or tile") {
  check_same(train({.format = kernels::StateFormat::fp32}), train({.format = kernels::StateFormat::split}));
  for (const auto format : {kernels::StateFormat::bf16, kernels::StateFormat::compact}) {
    check_same(train({.format = format}),
               train({.stage = 3, .state = Tier::nvme, .tile_elements = 384, .format = format}));
  }
}

TEST_CASE("what a program's slots add up to is what the engine reserves") {
  for (const int stage : {0, 1, 2, 3}) {
    for (const Tier tier : {Tier::host, Tier::nvme}) {
      const Outcome outcome = train({.stage = stage, .state = tier}).front();
      CHECK(outcome.reserved_bytes == outcome.planned_bytes);
    }
  }
}

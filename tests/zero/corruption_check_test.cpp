// Tests of the corruption check, which makes updates twice: it finds wrong bits and changes no right ones.
#include <catch2/catch.hpp>

#include "optim/step.h"
#include "tests/sanitizer.h"
#include "tests/zero/training_rig.h"
#include "zero/engine/corruption_check.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

// A backend that sometimes computes a wrong bit.
class FaultyBackend final : public kernels::Backend {
 public:
  void update(const TileMemory& tile, std::span<const kernels::Run> runs,
              std::span<const kernels::GroupStep> groups) override {
    right_->update(tile, runs, groups);
    if (is_faulty) tile.momentum[4 * (tile.count / 2)] ^= std::byte{1};
  }
  void cast(const ConstView& from, const View& to) override { right_->cast(from, to); }
  void clear(const View& to) override { right_->clear(to); }
  void sum(std::span<const ConstView> from, const View& into, bool continues, kernels::ExactSum* squares) override {
    right_->sum(from, into, continues, squares);
  }
  void accumulate_stochastic(const ConstView& from, const View& into, std::span<const kernels::Run> runs,
                             const kernels::RoundingPlace& place, kernels::ExactSum* squares) override {
    right_->accumulate_stochastic(from, into, runs, place, squares);
  }
  void sum_of_squares(const ConstView& values, kernels::ExactSum* into) override {
    right_->sum_of_squares(values, into);
  }
  void first_non_finite(const ConstView& values, std::uint64_t first_index, std::uint64_t* first) override {
    right_->first_non_finite(values, first_index, first);
  }
  void quantize(const ConstView& from, const kernels::Quantized& to, const kernels::CodeRounding& rounding) override {
    right_->quantize(from, to, rounding);
  }
  void dequantize(const kernels::ConstQuantized& from, const View& to) override { right_->dequantize(from, to); }
  void sum_quantized(std::span<const ConstView> from, kernels::CodeBits bits, const View& into) override {
    right_->sum_quantized(from, bits, into);
  }

  bool is_faulty = false;

 private:
  std::unique_ptr<kernels::Backend> right_ = kernels::cpu_backend({.threads = 1});
};

const std::vector<optim::Rule> rules{optim::AdamW{.lr = 0.02}, optim::AdamW{.lr = 0.01, .weight_decay = 0.0}};

}  // namespace

TEST_CASE("verifying changes no bit, and reports no fault where there is none") {
  Sweep sweep(7);
  for (const std::size_t ranks : {1u, 2u}) {
    for (const Placement& placement : placements(ranks)) {
      for (const auto format : all_state_formats) {
        if (!sweep.takes_next()) continue;
        CAPTURE(ranks, placement.shards, placement.parameters.fractions(), placement.state.fractions(), name(format));
        Setup setup{.placement = placement, .micro_steps = 2, .format = format, .max_norm = 0.05, .poisoned_step = 1};
        const std::vector<Outcome> expected = train(setup);
        setup.verify = 1;
        const std::vector<Outcome> outcomes = train(setup);
        check_same(expected, outcomes);
        for (const Outcome& outcome : outcomes) {
          CHECK(outcome.verified == 5);  // three steps that are made: one tile, then the next and the last one's again
        }
      }
    }
  }
}

TEST_CASE("a bit flipped between two updates is found, and its rank and its tensor are named") {
  for (const Tier tier : {Tier::device, Tier::host}) {
    for (const int stage : {0, 3}) {
      const std::vector<std::string> failures = failures_of_ranks(2, [&](Communicator& world) {
        Training training(odd_model(), world, rules,
                          {.stage = stage, .state = Spread(tier), .tile_elements = 256, .verify = 1});
        training.initialize(initial_parameters());
        SyntheticTrainer trainer(training.model(), world.rank());
        trainer.run(training, 0);
        training.step();
        TrainingState(training).visit([&](const LocalTile& tile) {
          if (!tile.frozen && world.rank() == 1) tile.memory.variance[0] ^= std::byte{16};
        });
        trainer.run(training, 1);
        training.step();
        training.finish();
      });
      CHECK_THAT(failures[1],
                 Contains("B3001") && Contains("found other bits than the last one left, first in the variance") &&
                     Contains("step 2, rank 1, tile") && Contains("which holds parts of") && Contains("unit "));
    }
  }
}

TEST_CASE("a change of state by its owner between two updates is not a fault") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  Training training(odd_model(), *world, rules, {.stage = 0, .tile_elements = 256, .verify = 1});
  training.initialize(initial_parameters());
  SyntheticTrainer trainer(training.model(), 0);
  for (std::size_t step = 0; step < 3; ++step) {
    trainer.run(training, step);
    training.step();
    TrainingState(training).change([](const LocalTile& tile) {
      if (!tile.frozen) tile.memory.variance[0] ^= std::byte{16};
    });
  }
  CHECK(training.metrics().verified == 3);
}

TEST_CASE("a wrong update is found when its tile is verified") {
  const CompiledPlan plan(
      odd_model(),
      {.placement = placement_of_stage(0, 1), .tile_elements = 256, .names = optim::AdamW::state, .rule = "AdamW"});
  FaultyBackend backend;
  MemoryAccounts accounts;
  const Slots slots(plan.program(), accounts, {}, {});
  const Arithmetic arithmetic(plan, slots, ExecContext(backend));
  CorruptionCheck check(plan, 2, 0);
  const auto step = [&](std::uint64_t number) {
    StepNumbers numbers{.number = number};
    for (const optim::Rule& rule : rules)
      numbers.groups.push_back(optim::at(rule, {.number = number}));
    for (const Op& op : plan.program().ops)
      if (op.kind == OpKind::update) check.update(op, numbers, arithmetic);
  };
  step(1);
  CHECK(check.places() == 0);
  backend.is_faulty = true;
  CHECK_THROWS_WITH(step(2), Contains("B3001") && Contains("gave other bits the second time, first in the momentum"));
}

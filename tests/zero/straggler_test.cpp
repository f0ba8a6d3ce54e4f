#include "zero/engine/agreement.h"

#include <catch2/catch.hpp>

#include "tests/comm/test_groups.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;

TEST_CASE("all ranks know which one is the slowest, for any mesh") {
  const std::vector<double> own{0.25, 0.5, 1.75, 0.125};
  for (const std::size_t shards : {1u, 2u, 4u}) {
    CAPTURE(shards);
    on_all_groups(4, [&](Communicator& ranks) {
      Mesh mesh = make_mesh(ranks, {.shards = shards, .replicas = 4 / shards});
      const Straggler straggler = find_straggler(mesh, own[ranks.rank()]);
      expect(straggler == Straggler{.slowest = 2, .seconds = 1.75, .median = 0.5, .least = 0.125}, to_text(straggler));
    });
  }
  CHECK_THAT(to_text(Straggler{}), Catch::Contains("not measured"));
  CHECK(to_text(Straggler{.slowest = 2, .seconds = 1.75, .median = 0.5, .least = 0.125}) ==
        "slowest rank 2: 1750.0 ms of its own, the median 500.0 ms, the least 125.0 ms");
}

TEST_CASE("a step reports the slowest trainer's time for the previous step") {
  const std::vector<std::string> failures = failures_of_ranks(2, [](Communicator& ranks) {
    const Model model = odd_model();
    Training training(model, ranks, {optim::AdamW{}, optim::AdamW{}}, {.stage = 2});
    training.initialize(initial_parameters());
    SyntheticTrainer trainer(model, ranks.rank());
    for (std::size_t step = 0; step < 2; ++step) {
      trainer.run(training, step);
      const StepResult result = training.step();
      expect((result.straggler.seconds > 0.0) == (step > 0), to_text(result.straggler));
      expect(step == 0 || result.straggler.seconds >= result.straggler.median, to_text(result.straggler));
      expect(step == 0 || result.straggler.slowest < 2, to_text(result.straggler));
    }
  });
  CHECK(failures == std::vector<std::string>(2));
}

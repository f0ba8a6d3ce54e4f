#include "zero/engine.h"

#include <catch2/catch.hpp>
#include <thread>

#include "zero/compile.h"
#include "zero/thread_communicator.h"

using namespace ballast;

namespace {

// An engine of one rank for two units.
struct Rig {
  Model model{.units = {{.name = "first", .tensors = {{"w", {10}}}}, {.name = "second", .tensors = {{"w", {10}}}}}};
  Placement placement = placement_of_stage(0, 1, Tier::host);
  Layout layout = make_layout(model, 1, 128);
  optim::StateLayout state{{kernels::StateFormat::split, DType::bf16, optim::AdamW::state}, 128};
  Program program =
      compile({.model = model, .layout = layout, .placement = placement, .state_bytes_per_tile = state.bytes()});
  std::unique_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = 1});
  ThreadGroup alone{1};
  std::unique_ptr<Communicator> self = thread_communicator(alone, 0, *backend);
  MemoryAccounts accounts;
  Engine engine{{model, layout, program, state, *self, *self, *backend, accounts}};
  std::vector<optim::Rule> rules{optim::AdamW{}};

  void use_all(float gradient) {
    engine.forward(0);
    engine.forward(1);
    for (const std::size_t unit : {1u, 0u}) {
      const View gradients = engine.backward(unit).gradients;
      backend->fill(gradients.part(0, 10), gradient);
    }
  }
};

}  // namespace

TEST_CASE("a trainer that leaves the program's order is told which unit is next") {
  Rig rig;
  CHECK_THROWS_WITH(rig.engine.forward(1), Catch::Contains("B1007") && Catch::Contains("unit first in forward"));
  CHECK_NOTHROW(rig.engine.forward(0));
  CHECK_THROWS_WITH(rig.engine.backward(1), Catch::Contains("unit second in forward"));
  CHECK_THROWS_WITH(rig.engine.step({.groups = rig.rules}), Catch::Contains("unit second first"));
  CHECK_NOTHROW(rig.engine.forward(1));
}

TEST_CASE("a step on gradients that are not finite changes nothing and does not count") {
  Rig rig;
  rig.use_all(1.0f);
  CHECK_FALSE(rig.engine.step({.groups = rig.rules}).skip);
  rig.use_all(std::numeric_limits<float>::infinity());
  const auto bits = [&] { return rig.engine.forward(0).parameters.as<bf16>()[3].bits; };
  CHECK(rig.engine.step({.groups = rig.rules}).skip);
  CHECK(rig.engine.steps() == 1);
  const std::uint16_t before = bits();
  rig.engine.forward(1);
  rig.backend->fill(rig.engine.backward(1).gradients, 1.0f);
  rig.backend->fill(rig.engine.backward(0).gradients, 1.0f);
  CHECK_FALSE(rig.engine.step({.groups = rig.rules}).skip);
  CHECK(rig.engine.steps() == 2);
  CHECK(bits() != before);
}

TEST_CASE("a rank that gives up ends the others' waiting") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  ThreadGroup group(2);
  const auto first = thread_communicator(group, 0, *backend);
  const auto second = thread_communicator(group, 1, *backend);
  std::thread other([&] { second->abort(); });
  CHECK_THROWS_WITH(first->barrier(), Catch::Contains("B3301"));
  other.join();
}

#include "zero/engine.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <thread>

#include "tests/temporary_directory.h"
#include "zero/comm/thread_communicator.h"
#include "zero/compile.h"

using namespace ballast;

namespace {

// An engine of one rank for two units.
struct Rig {
  explicit Rig(Tier tier = Tier::host, offload::RecordStore* records_of_tiles = nullptr)
      : placement(placement_of_stage(0, 1, tier)), records(records_of_tiles) {}

  Model model{.units = {{.name = "first", .tensors = {{"w", {10}}}}, {.name = "second", .tensors = {{"w", {10}}}}}};
  Placement placement;
  offload::RecordStore* records;
  Layout layout = make_layout(model, 1, 128);
  optim::StateLayout state{{kernels::StateFormat::split, DType::bf16, optim::AdamW::state}, 128};
  Program program =
      compile({.model = model, .layout = layout, .placement = placement, .state_bytes_per_tile = state.bytes()});
  std::unique_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = 1});
  ThreadGroup alone{1};
  std::unique_ptr<Communicator> self = thread_communicator(alone, 0, *backend);
  MemoryAccounts accounts;
  Engine engine{{model, layout, program, state, *self, *self, *backend, accounts, records}};
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

TEST_CASE("what cannot be run is refused before anything changes") {
  CHECK_THROWS_WITH(Rig(Tier::nvme), Catch::Contains("B1001") && Catch::Contains("records"));
  Rig rig;
  CHECK_THROWS_WITH(rig.engine.forward(2), Catch::Contains("B1001") && Catch::Contains("unit below 2"));
  const std::vector<bf16> values(rig.layout.units[0].elements);
  const std::vector<ConstView> too_few{std::span(values)};
  CHECK_THROWS_WITH(rig.engine.initialise(too_few), Catch::Contains("2 units"));

  rig.use_all(1.0f);
  CHECK_THROWS_WITH(rig.engine.step({}), Catch::Contains("B1001") && Catch::Contains("unit first, tensor w"));
  const std::vector<optim::Rule> wrong{optim::AdamW{.lr = -1.0}};
  CHECK_THROWS_WITH(rig.engine.step({.groups = wrong}), Catch::Contains("AdamW was given lr = -1"));
  CHECK_THROWS_AS(rig.engine.step({.groups = rig.rules, .max_norm = -1.0}), UsageError);
  CHECK_THROWS_AS(rig.engine.step({.groups = rig.rules, .loss_scale = 0.0}), UsageError);
  CHECK(rig.engine.steps() == 0);

  const optim::Decision decision = rig.engine.step({.groups = rig.rules});  // as if nothing had been asked before
  CHECK(decision.norm == Approx(std::sqrt(20.0)));
  CHECK(rig.engine.steps() == 1);
}

TEST_CASE("a record that cannot be read stops the step, and asking again does not pass it over") {
  const TemporaryDirectory directory;
  const auto queue = offload::open_queue();
  const offload::Drive drive{directory.path(), queue.get()};
  const std::size_t bytes =
      optim::StateLayout({kernels::StateFormat::split, DType::bf16, optim::AdamW::state}, 128).bytes();
  auto records = offload::RecordStore::create({.run_id = 1, .tiles = 2, .payload_bytes = bytes}, {&drive, 1});
  Rig rig(Tier::nvme, &records);
  rig.use_all(1.0f);
  std::filesystem::resize_file(directory.path() / "state.records", 8192);  // the tiles are gone
  for (int attempt = 0; attempt < 3; ++attempt) {
    CHECK_THROWS_WITH(rig.engine.step({.groups = rig.rules}), Catch::Contains("B3201"));
  }
  CHECK(records.generation() == 1);
}

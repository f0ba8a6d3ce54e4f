// Test of a training whose ranks share a drive: they update their tiles in rounds.
#include <ballast/training.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <thread>

#include "tests/temporary_directory.h"
#include "tests/zero/trainee.h"
#include "zero/comm/drive_peers.h"

using namespace ballast;
using namespace ballast::testing;

TEST_CASE("no rank of a training is more than a round of tiles ahead of one that shares its drive") {
  constexpr std::size_t ranks = 2, tiles = 128, tile_elements = 256;
  constexpr std::size_t round = 2 * tiles / DrivePeers::rounds_of_step;  // each tile is read and written
  constexpr std::size_t most_ahead = round * 5 / 4 + 16;  // and tiles that are read before they are updated
  const TemporaryDirectory directory;
  const Model model{{{.name = "h", .dtype = DType::fp32, .tensors = {{"weight", {ranks * tiles * tile_elements}}}}}};
  std::array<std::atomic<std::size_t>, ranks> updated{};
  std::atomic<std::size_t> farthest = 0;
  const auto failures = failures_of_ranks(ranks, [&](Communicator& world) {
    TrainingOptions options{.stage = 3, .state = Tier::nvme, .tile_elements = tile_elements, .threads = 1};
    options.drives = {.directories = {directory.path()}, .turn_patience = std::chrono::hours(1)};
    Training training(model, world, {optim::External::with_values(1)}, options);
    training.initialize(
        [](std::size_t, std::size_t, Range, const View& to) { std::ranges::fill(to.as_bytes(), std::byte{}); });
    const auto update = [&](const TilesToUpdate& turn) {
      if (world.rank() == 1) {  // the slowest
        std::this_thread::sleep_for(std::chrono::microseconds(500));
        const std::size_t ahead = updated[0] - std::min<std::size_t>(updated[0], updated[1]);
        farthest = std::max<std::size_t>(farthest, ahead);
      }
      updated[world.rank()] += turn.tiles.size();
    };
    for (int step = 0; step < 2; ++step) {
      training.forward(0);
      training.backward(0);
      training.step({.update = update});
    }
    training.finish();
  });
  CHECK(failures == std::vector<std::string>(ranks));
  CHECK(updated[0] == 2 * tiles);
  CHECK(updated[1] == 2 * tiles);
  CHECK(farthest <= most_ahead);
  CHECK(farthest > 0);
}

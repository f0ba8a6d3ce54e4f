// Tests of the state between steps, which is taken out and put in again; of norms that are requested; of gradients that
// are discarded.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <numeric>

#include "tests/temporary_directory.h"
#include "tests/zero/trainee.h"
#include "zero/plan/compile.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

// Returns the stretches of a tile's memory that are in use.
std::vector<std::span<std::byte>> stretches(const LocalTile& tile) {
  const TileMemory& memory = tile.memory;
  std::vector<std::span<std::byte>> all{{memory.parameter, memory.count * byte_size(memory.parameter_dtype)}};
  const auto add = [&](std::byte* begin, std::size_t bytes) {
    if (!tile.frozen && begin != nullptr) all.emplace_back(begin, bytes);
  };
  add(memory.master, memory.count * master_bytes(memory.format));
  for (std::byte* const moment : {memory.momentum, memory.variance}) {
    add(moment, moment_bytes(memory.format, memory.count));
  }
  for (float* const scales : {memory.momentum_scales, memory.variance_scales}) {
    add(reinterpret_cast<std::byte*>(scales), (memory.count + group_size - 1) / group_size * sizeof(float));
  }
  return all;
}

using Taken = std::map<std::pair<std::size_t, std::size_t>, std::vector<std::vector<std::byte>>>;

Taken take_out(
    Training& training, const TileFilter& which = [](const LocalTile&) { return true; }) {
  Taken taken;
  const auto take = [&](const LocalTile& tile) {
    for (const auto& stretch : stretches(tile)) {
      taken[{tile.unit, tile.range.first}].emplace_back(stretch.begin(), stretch.end());
    }
  };
  TrainingState(training).visit(take, which);
  return taken;
}

void put_in(Training& training, const Taken& taken) {
  TrainingState(training).change([&](const LocalTile& tile) {
    const auto& kept = taken.at({tile.unit, tile.range.first});
    const auto places = stretches(tile);
    for (std::size_t i = 0; i < places.size(); ++i) {
      std::ranges::copy(kept[i], places[i].begin());
    }
  });
}

}  // namespace

TEST_CASE("state that is copied into another training continues there with the same bits") {
  for (const Placement& placement : placements(2)) {
    INFO(text(placement));
    const TemporaryDirectory directory;
    const TrainingOptions options = options_of(placement, directory.path());
    const auto failures = failures_of_ranks(2, [&](Communicator& world) {
      Trainee one(world, options);
      for (const std::size_t step : {0u, 1u, 2u})
        one.step(step);
      const Taken taken = take_out(one.training);
      Trainee other(world, options);
      put_in(other.training, taken);
      TrainingState(other.training).set_steps(3);
      for (const std::size_t step : {3u, 4u}) {
        if (one.step(step).norm != other.step(step).norm) throw std::runtime_error("another norm");
      }
      if (one.parameters() != other.parameters()) throw std::runtime_error("other parameters");
      if (other.training.steps() != 5) throw std::runtime_error("another count");
    });
    CHECK(failures == std::vector<std::string>(2));
  }
}

TEST_CASE("changes that a rank refuses leave the state of a run as it was") {
  const TemporaryDirectory directory;
  const TrainingOptions options{.stage = 3,
                                .parameters = Tier::nvme,
                                .gradients = Tier::host,
                                .state = Tier::nvme,
                                .drives = {.directories = {directory.path()}, .run = "test", .depth = 4},
                                .tile_elements = 256};
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    Trainee trainee(world, options);
    trainee.step(0);
    const Taken before = take_out(trainee.training);
    bool refused = false;
    try {
      TrainingState(trainee.training)
          .change(
              [&](const LocalTile& tile) {
                if (!tile.frozen) std::ranges::fill(stretches(tile)[0], std::byte{7});
              },
              [] { throw std::runtime_error("no"); });
    } catch (const std::runtime_error&) {
      refused = true;
    }
    if (!refused) throw std::runtime_error("the change was not refused");
    if (take_out(trainee.training) != before) throw std::runtime_error("other state");
    put_in(trainee.training, before);  // the state can be changed again
    if (take_out(trainee.training) != before) throw std::runtime_error("other state after another change");
  });
  CHECK(failures == std::vector<std::string>(2));
}

TEST_CASE("tiles on drives that are not requested are not read") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const TemporaryDirectory directory;
  Trainee trainee(*world, {.stage = 0,
                           .state = Tier::nvme,
                           .drives = {.directories = {directory.path()}, .run = "test", .depth = 4},
                           .tile_elements = 256});
  trainee.step(0);
  const Taken all = take_out(trainee.training);
  const Taken found = take_out(trainee.training, [](const LocalTile& tile) { return tile.unit == 1; });
  CHECK(found.size() > 1);
  CHECK(found.size() < all.size());
  for (const auto& [place, bytes] : found) {
    CHECK(place.first == 1);
    CHECK(bytes == all.at(place));
  }
  for (const auto& file : std::filesystem::recursive_directory_iterator(directory.path())) {
    if (file.is_regular_file()) std::filesystem::resize_file(file.path(), 0);
  }
  CHECK(take_out(trainee.training, [](const LocalTile&) { return false; }).empty());
  CHECK_THROWS(take_out(trainee.training));
}

TEST_CASE("gradient_norm() returns the step's norm, also in off-plan steps") {
  for (const Placement& placement : placements(2)) {
    for (const std::size_t micro_steps : {1u, 3u}) {  // the program is made for one
      INFO(text(placement) << ", " << micro_steps << " micro-steps");
      const TemporaryDirectory directory;
      const auto failures = failures_of_ranks(2, [&](Communicator& world) {
        TrainingOptions options = options_of(placement, directory.path());
        options.sums_micro_steps = true;
        Trainee trainee(world, options);
        for (std::size_t step = 0; step < 4; ++step) {
          for (std::size_t micro = 0; micro < micro_steps; ++micro)
            trainee.trainer.run(trainee.training, step * micro_steps + micro);
          const double asked = trainee.training.gradient_norm(2.0);
          double squares = 0.0;
          for (const std::vector<double>& unit : TrainingState(trainee.training).tensor_norms(2.0)) {
            squares = std::inner_product(unit.begin(), unit.end(), unit.begin(), squares);
          }
          if (std::abs(std::sqrt(squares) - asked) > 1e-12 * asked)
            throw std::runtime_error("tensors' norms do not add up");
          const double norm = trainee.training.step(2.0).norm;
          if (asked != norm || norm == 0.0) throw std::runtime_error(std::to_string(asked) + " is not the step's");
        }
      });
      CHECK(failures == std::vector<std::string>(2));
    }
  }
}

TEST_CASE("gradients after a call of gradient_norm() are added as without it, or refused where sums are made once") {
  for (const Placement& placement : placements(2)) {
    INFO(text(placement));
    const TemporaryDirectory directory;
    const auto failures = failures_of_ranks(2, [&](Communicator& world) {
      const TrainingOptions options = options_of(placement, directory.path());
      Trainee plain(world, options), asked(world, options);
      for (std::size_t step = 0; step < 3; ++step) {
        for (std::size_t micro = 0; micro < 2; ++micro) {
          plain.trainer.run(plain.training, 2 * step + micro);
          asked.trainer.run(asked.training, 2 * step + micro);
          if (!(asked.training.gradient_norm(1.0, micro + 1) > 0.0)) throw std::runtime_error("there is no norm");
        }
        const StepOptions both{.micro_steps = 2};
        if (plain.training.step(both).norm != asked.training.step(both).norm) throw std::runtime_error("norms differ");
      }
      if (plain.parameters() != asked.parameters()) throw std::runtime_error("parameters differ");
    });
    CHECK(failures == std::vector<std::string>(2));
  }
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  Trainee trainee(*world, {.stage = 0, .reduction = Reduction::boundary});
  trainee.trainer.run(trainee.training, 0);
  CHECK(trainee.training.gradient_norm() > 0.0);
  CHECK_THROWS_WITH(trainee.training.backward(0), Contains("B1007") && Contains("norm"));
  CHECK(trainee.training.step().step == 1);
}

TEST_CASE("discarded gradients change nothing") {
  for (const Placement& placement : placements(2)) {
    INFO(text(placement));
    const TemporaryDirectory directory;
    const auto failures = failures_of_ranks(2, [&](Communicator& world) {
      const TrainingOptions options = options_of(placement, directory.path());
      Trainee plain(world, options);
      Trainee other(world, options);
      plain.step(0), other.step(0);
      other.trainer.run(other.training, 77);
      const StepResult result = other.training.step({.groups = other.training.groups(), .discard = true});
      if (!result.skipped || result.step != 1 || result.reason != "the caller discarded the gradients")
        throw std::runtime_error("not discarded: " + result.reason);
      plain.step(1), other.step(1);
      if (plain.parameters() != other.parameters()) throw std::runtime_error("other parameters");
    });
    CHECK(failures == std::vector<std::string>(2));
  }
}

TEST_CASE("full parameters are at the address where a trainer below stage 3 sees each update") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  Trainee trainee(*world, {.stage = 0});
  const ConstView whole = TrainingState(trainee.training).full_parameters(0);
  trainee.step(0);
  trainee.training.finish();
  const Lease lease = trainee.training.forward(0);
  CHECK(lease.parameters().data() == whole.data());
  CHECK(lease.parameters().count() == whole.count());
}

TEST_CASE("a rule without state has tiles without master and moments") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const Model model{.units = {{.name = "first", .dtype = DType::fp32, .tensors = {{"w", {300}}}}}};
  Training training(model, *world, {optim::Sgd{}}, {.stage = 0});
  training.initialize(initial_parameters());
  std::size_t elements = 0;
  TrainingState(training).visit([&](const LocalTile& tile) {
    CHECK(tile.memory.master == nullptr);
    CHECK(tile.memory.momentum == nullptr);
    elements += tile.range.count;
  });
  CHECK(elements >= 300);
}

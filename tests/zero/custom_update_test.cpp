// Tests of updates that the trainer makes itself, in memory and on drives, with values of its own.
#include <ballast/tensor_state.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "tests/sanitizer.h"
#include "tests/temporary_directory.h"
#include "tests/zero/trainee.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

constexpr float rate = 0.02f;

void update_as_sgd(const TilesToUpdate& turn) {
  for (const SummedTile& tile : turn.tiles) {
    const auto gradients = tile.gradients.as<float>();
    const auto masters = tile.masters.as<float>();
    for (std::size_t i = 0; i < tile.range.count; ++i) {
      masters[i] = std::fma(-rate, gradients[i] * turn.gradient_factor, masters[i]);
    }
    std::ranges::fill(gradients, NAN);  // the trainer may overwrite them
  }
}

// Keeps the sum of all gradients, and the greatest one; the sum is the step.
void update_with_values(const TilesToUpdate& turn) {
  for (const SummedTile& tile : turn.tiles) {
    const auto gradients = ConstView(tile.gradients).as<float>();
    for (std::size_t i = 0; i < tile.range.count; ++i) {
      const float gradient = gradients[i] * turn.gradient_factor;
      float& sum = tile.own.array(0)[i];
      float& greatest = tile.own.array(1)[i];
      sum += gradient;
      greatest = std::max(greatest, gradient);
      tile.masters.as<float>()[i] -= rate * sum / (1.0f + greatest);
    }
  }
}

std::vector<Placement> placements_of_own_rule(std::size_t ranks) {
  std::vector<Placement> all;
  for (Placement placement : placements(ranks)) {
    all.push_back(placement);
    if (placement.state.host < 1.0) continue;
    placement.gradients = Tier::host;
    all.push_back(placement);
  }
  return all;
}

TrainingOptions options_of_own_rule(const Placement& placement, const std::filesystem::path& directory) {
  TrainingOptions options = options_of(placement, directory);
  options.format = StateFormat::fp32;
  return options;
}

std::span<const optim::Rule> groups(Trainee& trainee) { return trainee.training.groups(); }

// Returns a value of every tensor of this rank; elements of other ranks are zero.
std::vector<float> own_values(Training& training, std::size_t number) {
  TensorState state(training);
  std::vector<float> all;
  for (std::size_t unit = 0; unit < training.model().units.size(); ++unit) {
    const std::vector<Tensor>& tensors = training.model().units[unit].tensors;
    for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
      std::vector<float> values(tensors[tensor].elements());
      if (!tensors[tensor].frozen) state.read_moment(unit, tensor, own_value(number), values.data());
      all.insert(all.end(), values.begin(), values.end());
    }
  }
  return all;
}

const std::vector<optim::Rule> external(2, optim::External{});
const std::vector<optim::Rule> with_values(2, optim::External::with_values(2));

}  // namespace

TEST_CASE("custom updates give the bits of the rule that they repeat, in every tier") {
  const TemporaryDirectory directory;
  Sweep sweep(2);
  for (const Placement& placement : placements_of_own_rule(2)) {
    if (!sweep.takes_next()) continue;
    INFO(text(placement));
    TrainingOptions options = options_of_own_rule(placement, directory.path());
    options.sums_micro_steps = true;
    const auto failures = failures_of_ranks(2, [&](Communicator& world) {
      Trainee rule(world, options, {optim::Sgd{.lr = rate}, optim::Sgd{.lr = rate}});
      Trainee own(world, options, external);
      for (const std::size_t step : {0u, 1u, 2u, 3u, 4u}) {
        for (std::size_t micro = 0; micro < (step == 2 ? 2 : 1); ++micro) {  // step 2 leaves the program's order
          rule.trainer.run(rule.training, step), own.trainer.run(own.training, step);
        }
        const bool discard = step == 3;
        rule.training.step({.groups = groups(rule), .max_norm = 0.5, .discard = discard});
        own.training.step({.groups = groups(own), .max_norm = 0.5, .discard = discard, .update = update_as_sgd});
      }
      if (rule.parameters() != own.parameters()) throw std::runtime_error("other parameters");
    });
    CHECK(failures == std::vector<std::string>(2));
  }
}

TEST_CASE("values of the trainer's own are the same in every tier, and its updates too") {
  const TemporaryDirectory directory;
  std::vector<std::vector<float>> sums(2);
  std::vector<std::vector<std::byte>> parameters(2);
  for (const int stage : {0, 2, 3}) {
    for (const Placement& placement : placements_of_own_rule(2)) {
      const TrainingOptions options = options_of_own_rule(placement, directory.path());
      if (options.stage != stage) continue;
      INFO(text(placement));
      const bool is_first = placement.state.device == 1.0;
      const auto failures = failures_of_ranks(2, [&](Communicator& world) {
        Trainee own(world, options, with_values);
        for (const std::size_t step : {0u, 1u, 2u}) {
          own.trainer.run(own.training, step);
          own.training.step({.groups = groups(own), .update = update_with_values});
        }
        const std::vector<std::byte> found = own.parameters();
        std::vector<float> values = own_values(own.training, 0);
        const std::vector<float> greatest = own_values(own.training, 1);
        if (greatest == std::vector<float>(greatest.size())) throw std::runtime_error("no second value");
        values.insert(values.end(), greatest.begin(), greatest.end());
        if (is_first) parameters[world.rank()] = found, sums[world.rank()] = values;
        if (parameters[world.rank()] != found) throw std::runtime_error("other parameters");
        if (sums[world.rank()] != values) throw std::runtime_error("other values");
      });
      CHECK(failures == std::vector<std::string>(2));
    }
  }
}

TEST_CASE("a custom update gets every tile once, those in memory together, and knows the last call") {
  const TemporaryDirectory directory;
  for (const Placement& placement : placements_of_own_rule(1)) {
    INFO(text(placement));
    const auto backend = kernels::cpu_backend({.threads = 1});
    const auto world = lone_communicator(*backend);
    Trainee own(*world, options_of_own_rule(placement, directory.path()), external);
    own.trainer.run(own.training, 0);
    std::vector<std::pair<std::size_t, std::size_t>> seen;
    std::size_t calls = 0, last = 0, together = 0;
    const auto look = [&](const TilesToUpdate& turn) {
      ++calls;
      if (turn.is_last) last = calls;
      if (turn.tiles.size() > 1) ++together;
      for (const SummedTile& tile : turn.tiles)
        seen.emplace_back(tile.unit, tile.range.first);
    };
    own.training.step({.groups = groups(own), .update = look});
    std::vector<std::pair<std::size_t, std::size_t>> wanted;
    for (const LocalTile& tile : TrainingState(own.training).tiles()) {
      if (!tile.frozen) wanted.emplace_back(tile.unit, tile.range.first);
    }
    std::ranges::sort(seen);
    std::ranges::sort(wanted);
    CHECK(seen == wanted);
    CHECK(last == calls);
    CHECK(together <= 1);
    if (placement.state.nvme == 1.0) CHECK(calls == wanted.size());
    if (placement.state.nvme == 0.0) CHECK(calls == 1);
  }
}

TEST_CASE("a custom update knows the tensors of its tiles, their groups and their elements") {
  const TemporaryDirectory directory;
  for (const Placement& placement : placements_of_own_rule(2)) {
    INFO(text(placement));
    const auto failures = failures_of_ranks(2, [&](Communicator& world) {
      Trainee own(world, options_of_own_rule(placement, directory.path()), external);
      own.trainer.run(own.training, 0);
      std::map<std::pair<std::size_t, std::size_t>, std::vector<float>> initial;  // the keys are a unit and a tensor
      const std::vector<Unit>& units = own.training.model().units;
      const auto values_of = [&](std::size_t unit, std::size_t tensor) -> std::vector<float>& {
        std::vector<float>& values = initial[{unit, tensor}];
        if (!values.empty()) return values;
        const std::size_t count = units[unit].tensors[tensor].elements();
        std::vector<std::byte> memory(count * byte_size(units[unit].dtype));
        const View view(memory.data(), count, units[unit].dtype);
        initial_parameters()(unit, tensor, {0, count}, view);
        for (std::size_t i = 0; i < count; ++i)
          values.push_back(value_of(view, i));
        return values;
      };
      std::size_t wrong = 0;
      const auto look = [&](const TilesToUpdate& turn) {
        for (const SummedTile& tile : turn.tiles) {
          for (const TilePart& part : tile.parts) {
            if (part.group != units[tile.unit].tensors[part.tensor].group) ++wrong;
            const std::vector<float>& expected = values_of(tile.unit, part.tensor);
            for (std::size_t i = 0; i < part.range.count; ++i) {
              if (tile.masters.as<float>()[part.first + i] != expected.at(part.range.first + i)) ++wrong;
            }
          }
        }
      };
      own.training.step({.update = look});
      if (wrong > 0) throw std::runtime_error(std::to_string(wrong) + " values are others");
      if (initial.empty()) throw std::runtime_error("no tile has a part");
    });
    CHECK(failures == std::vector<std::string>(2));
  }
}

TEST_CASE("a custom update that fails ends the training on all ranks") {
  const TemporaryDirectory directory;
  for (const Tier state : {Tier::device, Tier::nvme}) {
    const auto failures = failures_of_ranks(2, [&](Communicator& world) {
      TrainingOptions options{.stage = 2, .state = Spread(state), .drives = {.directories = {directory.path()}}};
      options.gradients = Spread(state == Tier::nvme ? Tier::host : Tier::device);
      options.format = StateFormat::fp32;
      Trainee own(world, options, external);
      own.trainer.run(own.training, 0);
      const auto fails_on_rank_1 = [&](const TilesToUpdate& turn) {
        if (world.rank() == 1 && turn.is_last) throw std::runtime_error("nothing works");
        update_as_sgd(turn);
      };
      own.training.step({.groups = groups(own), .update = fails_on_rank_1});
      own.training.finish();
    });
    CHECK_THAT(failures[0], Contains("B3301") && Contains("nothing works"));
    CHECK(failures[1] == "nothing works");
  }
}

TEST_CASE("a run of custom updates resumes with their values and note, as of the last step that did not fail") {
  const TemporaryDirectory directory;
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const auto after_the_failure = lone_communicator(*backend);
  TrainingOptions options{.stage = 3, .state = Tier::nvme, .tile_elements = 256};
  options.drives = {.directories = {directory.path()}, .run = "mine"};
  options.format = StateFormat::fp32;
  const Model model = odd_model();
  SyntheticTrainer trainer(model, 0);
  const auto begin = [&](Communicator& on) {
    auto training = std::make_unique<Training>(model, on, with_values, options);
    training->start(initial_parameters());
    return training;
  };
  const auto step = [&](Training& training, std::size_t number, const TrainerUpdate& update) {
    trainer.run(training, number);
    training.step({.groups = training.groups(), .update = update});
  };
  const auto note = [](std::size_t number) { return std::vector<std::byte>{std::byte{7}, std::byte(number)}; };

  auto whole = begin(*world);
  CHECK(whole->note().empty());
  for (const std::size_t number : {1u, 2u}) {
    step(*whole, number, [&](const TilesToUpdate& turn) {
      update_with_values(turn);
      if (turn.is_last) whole->set_note(note(number));
    });
  }
  whole->finish();
  const std::vector<float> sums = own_values(*whole, 0);
  std::size_t turns = 0;
  CHECK_THROWS_WITH(step(*whole, 3,
                         [&](const TilesToUpdate& turn) {
                           update_with_values(turn);
                           whole->set_note(note(3));
                           if (++turns == 2) throw std::runtime_error("nothing works");
                         }),
                    "nothing works");
  whole.reset();

  const auto resumed = begin(*after_the_failure);
  CHECK(resumed->steps() == 2);
  CHECK(resumed->note() == note(2));
  CHECK(own_values(*resumed, 0) == sums);
  TrainingState(*resumed).change([](const LocalTile&) {});  // commits again
  CHECK(resumed->note() == note(2));
}

TEST_CASE("a run of custom updates is not resumed with another number of values") {
  const TemporaryDirectory directory;
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  TrainingOptions options{.stage = 3, .state = Tier::nvme, .tile_elements = 256};
  options.drives = {.directories = {directory.path()}, .run = "mine"};
  options.format = StateFormat::fp32;
  { Training(odd_model(), *world, with_values, options).start(initial_parameters()); }
  CHECK_THROWS_WITH(Training(odd_model(), *world, external, options),
                    Contains("B1009") && Contains("with 2 values of each element"));
}

TEST_CASE("custom updates are refused where they are not supported") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const auto refusal = [&](const TrainingOptions& options, const std::vector<optim::Rule>& rules,
                           const TrainerUpdate& update) -> std::string {
    try {
      Trainee trainee(*world, options, rules);
      trainee.training.prepare({.groups = trainee.training.groups(), .update = update});
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  const auto fp32 = StateFormat::fp32;
  CHECK(refusal({.stage = 0, .format = fp32}, external, update_as_sgd).empty());
  CHECK_THAT(refusal({.stage = 0, .format = fp32}, external, {}), Contains("B1001") && Contains("External"));
  CHECK_THAT(refusal({.stage = 0}, {optim::Sgd{}, optim::Sgd{}}, update_as_sgd), Contains("B1001"));
  CHECK_THAT(refusal({.stage = 0}, external, update_as_sgd), Contains("B1005") && Contains("format fp32"));
  CHECK_THAT(refusal({.stage = 0, .format = fp32, .schedule = {.update_in_backward = true}}, external, update_as_sgd),
             Contains("after the backward pass"));
  CHECK_THROWS_WITH(Trainee(*world, {.stage = 0, .format = fp32}, {optim::External{}, optim::External::with_values(1)}),
                    Contains("B1005") && Contains("own values"));
  CHECK_THROWS_WITH(optim::check(optim::External::with_values(9)), Contains("B1005") && Contains("at most 8"));
}

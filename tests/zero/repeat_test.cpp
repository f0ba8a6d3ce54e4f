// Tests of updates that a run on drives makes before the norm is known: bits are those of updates after it.
#include <algorithm>
#include <catch2/catch.hpp>
#include <random>

#include "tests/sanitizer.h"
#include "tests/temporary_directory.h"
#include "tests/zero/mirrored_run.h"
#include "tests/zero/progress_pipe.h"
#include "tests/zero/trainee.h"
#include "zero/engine/off_plan.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr double always = 1.0;  // a share of repeated steps that is allowed

Placement on_drives(std::size_t ranks, Tier parameters, Tier gradients = Tier::device) {
  Placement placement = placement_of_stage(3, ranks);
  placement.parameters = Spread(parameters);
  placement.gradients = Spread(gradients);
  placement.state = Tier::nvme;
  return placement;
}

// A norm that clips about half of the steps.
double norm_between(const Setup& setup) {
  std::vector<double> norms = train(setup)[0].norms;
  std::ranges::sort(norms);
  return (norms[norms.size() / 2 - 1] + norms[norms.size() / 2]) / 2;
}

std::size_t clipped(const Outcome& outcome, double max_norm) {  // or skipped
  return static_cast<std::size_t>(
      std::ranges::count_if(outcome.norms, [&](double norm) { return !(norm <= max_norm); }));
}

}  // namespace

TEST_CASE(
    "updates before the norm have the bits of updates after it, in steps that clip, that do not, and that are skipped") {
  Sweep sweep(7);
  for (const std::size_t ranks : {1u, 2u, 3u}) {
    for (const std::size_t micro_steps : {1u, 2u}) {
      Setup reference{.placement = placement_of_stage(0, ranks), .micro_steps = micro_steps, .steps = 8};
      reference.max_norm = norm_between(reference);
      reference.poisoned_step = 5;
      const std::vector<Outcome> expected = train(reference);
      REQUIRE(clipped(expected[0], reference.max_norm) >= 3);
      for (const Placement& placement :
           {on_drives(ranks, Tier::device), on_drives(ranks, Tier::host), on_drives(ranks, Tier::nvme),
            on_drives(ranks, Tier::device, Tier::host), on_drives(ranks, Tier::nvme, Tier::host)}) {
        for (const Schedule& schedule : {Schedule{.prefetch = 0, .staging_slots = 1}, Schedule{.kept_records = 2},
                                         Schedule{.prefetch = 2, .kept_records = 100, .overlap_gathers = true}}) {
          for (const StateFormat format : {StateFormat::split, StateFormat::fp32}) {
            if (!sweep.takes_next()) continue;
            CAPTURE(ranks, micro_steps, placement.parameters.fractions(), placement.gradients.fractions(),
                    schedule.kept_records, name(format));
            Setup setup = reference;
            setup.placement = placement;
            setup.schedule = schedule;
            setup.format = format;
            setup.keeps_run = true;
            setup.verify = 1;
            setup.schedule.most_repeats = always;
            const std::vector<Outcome> early = train(setup);
            check_same(expected, early);
            CHECK(early[0].repeated == clipped(expected[0], reference.max_norm));
            if (format != StateFormat::split) continue;  // the order of updates does not depend on the format
            setup.schedule.most_repeats = 0;
            const std::vector<Outcome> late = train(setup);
            check_same(expected, late);
            CHECK(late[0].repeated == 0);
            CHECK(early[0].reserved_bytes == late[0].reserved_bytes);
          }
        }
      }
    }
  }
}

TEST_CASE("a step that leaves its order undoes the updates that it has made") {
  const Model model = odd_model();
  const Trace plain = plain_order(model);
  Trace looks = plain;  // uses units again that are updated already
  looks.push_back({0, Phase::forward});
  looks.push_back({1, Phase::backward});
  for (const std::size_t ranks : {1u, 2u}) {
    const std::vector<std::vector<Trace>> uses{{plain}, {plain, plain}, {plain}, {looks}, {plain}, {plain, looks}};
    Setup reference{.placement = placement_of_stage(0, ranks), .steps = 9, .uses_by_step = uses};
    reference.max_norm = norm_between(reference);
    const std::vector<Outcome> expected = train(reference);
    for (const Tier parameters : {Tier::device, Tier::host, Tier::nvme}) {
      for (const std::size_t kept_records : {std::size_t{0}, std::size_t{2}}) {
        CAPTURE(ranks, static_cast<int>(parameters), kept_records);
        Setup setup = reference;
        setup.placement = on_drives(ranks, parameters);
        setup.schedule = {.kept_records = kept_records, .most_repeats = always};
        setup.keeps_run = true;
        const std::vector<Outcome> outcomes = train(setup);
        check_same(expected, outcomes);
        CHECK(outcomes[0].repeated >= 3);
      }
    }
  }
}

namespace {

using Change = std::function<void(Trainee& trainee)>;  // between the backward pass and the step

// Returns the parameters after three steps, of which the second has the change.
std::vector<std::byte> train_with(const Change& change, double most_repeats, std::size_t repeated) {
  const TemporaryDirectory directory;
  std::vector<std::byte> parameters;
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    TrainingOptions options = options_of(on_drives(2, Tier::device), directory.path());
    options.drives.run = "mine";
    options.schedule.most_repeats = most_repeats;
    Trainee trainee(world, options);
    for (std::size_t step = 0; step < 3; ++step) {
      trainee.trainer.run(trainee.training, step);
      step == 1 ? change(trainee) : void(trainee.training.step());
    }
    const std::size_t counted = trainee.training.metrics().repeated;
    const std::vector<std::byte> bytes = trainee.parameters();
    if (world.rank() > 0) return;
    CHECK(counted == repeated);
    parameters = bytes;
  });
  CHECK(failures == std::vector<std::string>(2));
  return parameters;
}

}  // namespace

TEST_CASE("a step with other options than expected makes its updates again") {
  const std::vector<std::pair<std::string, Change>> changes{
      {"nothing", [](Trainee& trainee) { trainee.training.step(); }},
      {"another learning rate",
       [](Trainee& trainee) {
         trainee.training.set_lr(0.5);
         trainee.training.step();
       }},
      {"a loss scale", [](Trainee& trainee) { trainee.training.step(8.0); }},
      {"another number of micro-steps is refused, and the step is made",
       [](Trainee& trainee) {
         bool is_refused = false;
         try {
           trainee.training.step({.micro_steps = 2});
         } catch (const UsageError&) {
           is_refused = true;
         }
         if (!is_refused) throw std::runtime_error("the number was not refused");
         trainee.training.step();
       }},
      {"a tensor that is left out",
       [](Trainee& trainee) {
         trainee.training.leave_out(1, 0);
         trainee.training.step();
       }},
      {"gradients that are dropped", [](Trainee& trainee) { trainee.training.step({.discard = true}); }},
      {"gradients that are changed",
       [](Trainee& trainee) {
         TrainingState(trainee.training).visit_gradients([](std::size_t, std::size_t, const View& gradients, bool) {
           std::ranges::fill(gradients.as<float>(), 0.5f);
         });
         trainee.training.step();
       }},
      {"a look at the state",
       [](Trainee& trainee) {
         TrainingState(trainee.training).visit([](const LocalTile&) {});
         trainee.training.step();
       }},
      {"a look at parameters", [](Trainee& trainee) {
         { const Lease lease = trainee.training.forward(0); }
         trainee.training.step();
       }}};
  for (const auto& [what, change] : changes) {
    INFO(what);
    const bool is_as_expected = what == "nothing" || what.starts_with("another number");
    CHECK((train_with(change, always, is_as_expected ? 0 : 1) == train_with(change, 0, 0)));
  }
}

TEST_CASE("rules of the caller's own are expected again, or said before") {
  const std::vector<optim::Rule> rules{optim::AdamW{.lr = 0.1}, optim::AdamW{.lr = 0.2}};
  for (const bool says : {false, true}) {
    const TemporaryDirectory directory;
    const auto failures = failures_of_ranks(1, [&](Communicator& world) {
      TrainingOptions options = options_of(on_drives(1, Tier::device), directory.path());
      options.drives.run = "mine";
      options.schedule.most_repeats = always;
      Trainee trainee(world, options);
      for (std::size_t step = 0; step < 3; ++step) {
        if (says) trainee.training.expect(rules);
        trainee.trainer.run(trainee.training, step);
        trainee.training.step({.groups = rules});
      }
      CHECK(trainee.training.metrics().repeated == (says ? 0 : 1));
    });
    CHECK(failures == std::vector<std::string>(1));
  }
}

TEST_CASE("where many steps repeat their updates, these come after the norm again") {
  Setup setup{.placement = on_drives(2, Tier::nvme), .max_norm = 1e-3, .steps = 12, .keeps_run = true};
  const std::vector<Outcome> outcomes = train(setup);
  CHECK(outcomes[0].repeated == 1);
  CHECK(clipped(outcomes[0], setup.max_norm) == setup.steps);
  Setup reference = setup;
  reference.placement = placement_of_stage(0, 2);
  check_same(train(reference), outcomes);
}

TEST_CASE("updates return before the norm when the share of repeated steps has halved") {
  RepeatShare share(0.25);
  CHECK(share.add(false));
  CHECK(share.add(false));
  CHECK_FALSE(share.add(true));  // a third
  std::size_t steps = 0;
  while (!share.add(false))
    ++steps;
  CHECK(steps == 5);  // one of eight
  for (int step = 0; step < 20; ++step)
    CHECK(share.add(false));
  CHECK(share.add(true));
  RepeatShare always_early(1.0);
  for (int step = 0; step < 20; ++step)
    CHECK(always_early.add(true));
}

TEST_CASE("a mirror has the updates that were made again") {
  const TemporaryDirectory directories[2];
  KeptRun run = mirrored_run({"a", "b"});
  run.options.max_norm = 1e-3;
  run.options.schedule.most_repeats = 0;
  const AllValues expected = begun_values(run, directories[0]);
  run.options.schedule.most_repeats = always;
  CHECK((begun_values(run, directories[1]) == expected));
  lose(run, "a");
  check_hosts_resume(run, expected);
}

TEST_CASE("a training that is killed while it makes updates again resumes with the bits of one that was not killed") {
  Setup setup{.placement = on_drives(3, Tier::device), .tile_elements = 128, .steps = 60, .keeps_run = true};
  setup.schedule.most_repeats = always;
  setup.max_norm = norm_between(setup);
  const std::vector<Outcome> expected = train(setup);
  REQUIRE(expected[0].repeated > 20);
  std::mt19937 random(7);
  for (int attempt = 0; attempt < (sanitized ? 2 : 6); ++attempt) {
    const TemporaryDirectory directory;
    setup.directory = directory.path();
    std::size_t steps = 0;
    for (int kill = 0; kill < 3; ++kill) {
      const std::size_t more = random() % 10;
      kill_after(more, std::chrono::microseconds(random() % 3000), [&](int descriptor) {
        Setup reporting = setup;
        reporting.progress = descriptor;
        train(reporting);
      });
      steps += more;
    }
    const std::vector<Outcome> outcomes = train(setup);
    CAPTURE(attempt);
    for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
      CHECK(outcomes[rank].steps == setup.steps);
      CHECK(outcomes[rank].began_at + 6 >= steps);
      CHECK((outcomes[rank].parameters == expected[rank].parameters));
    }
  }
}

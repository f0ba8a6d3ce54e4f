// Tests of whole steps of a training.
#include <catch2/catch.hpp>
#include <cmath>

#include "tests/temporary_directory.h"
#include "tests/zero/training_rig.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

// A training of one rank and two units.
struct LoneTraining {
  explicit LoneTraining(TrainingOptions options = {.stage = 0}, std::vector<optim::Rule> rules = {optim::AdamW{}})
      : training({{{.name = "first", .tensors = {{"w", {10}}}}, {.name = "second", .tensors = {{"w", {10}}}}}}, *world,
                 std::move(rules), options) {}

  void use_all(float gradient) {
    for (const std::size_t unit : {0u, 1u})
      training.forward(unit);
    for (const std::size_t unit : {1u, 0u}) {
      const Lease lease = training.backward(unit);
      for (std::size_t i = 0; i < 10; ++i)
        set_value(lease.gradient(0), i, gradient);
    }
  }

  std::unique_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = 1});
  std::unique_ptr<Communicator> world = lone_communicator(*backend);
  Training training;
};

}  // namespace

TEST_CASE("a training without initial parameters refuses to run") {
  LoneTraining alone;
  CHECK_THROWS_WITH(alone.training.forward(0), Contains("B1007") && Contains("initialize()"));
  CHECK_THROWS_WITH(alone.training.step(), Contains("B1007") && Contains("initialize()"));
}

TEST_CASE("a step is refused until every lease has ended") {
  LoneTraining alone;
  alone.training.initialize(initial_parameters());
  alone.training.forward(0);
  alone.training.forward(1);
  alone.training.backward(1);
  {
    const Lease held = alone.training.backward(0);
    CHECK_THROWS_WITH(alone.training.step(), Contains("B1007") && Contains("the end of all leases"));
  }
  CHECK(alone.training.step().step == 1);
}

TEST_CASE("invalid options and calls are refused before anything changes") {
  CHECK_THROWS_WITH(LoneTraining({.stage = 3, .state = Tier::nvme}), Contains("B1001") && Contains("directories"));
  CHECK_THROWS_WITH(LoneTraining({.stage = 0, .replicas = 2}), Contains("divided"));
  CHECK_THROWS_WITH(LoneTraining({.stage = 0}, {}), Contains("at least one rule"));
  CHECK_THROWS_WITH(LoneTraining({.stage = 0}, {optim::AdamW{}, optim::Lion{}}),
                    Contains("parameter group 1") && Contains("the rule AdamW") && Contains("the rule Lion"));
  LoneTraining alone;
  alone.training.initialize(initial_parameters());
  CHECK_THROWS_WITH(alone.training.forward(2), Contains("B1001") && Contains("unit") && Contains("below 2"));
  CHECK_THROWS_WITH(LoneTraining().training.resume(initial_parameters()),
                    Contains("B1005") && Contains("not on a drive"));
  const TemporaryDirectory directory;
  LoneTraining nameless({.stage = 3, .state = Tier::nvme, .drives = {.directories = {directory.path()}}});
  CHECK_THROWS_WITH(nameless.training.resume(initial_parameters()), Contains("B1005") && Contains("not on a drive"));
  alone.use_all(1.0f);
  alone.training.groups() = {};
  CHECK_THROWS_WITH(alone.training.step(), Contains("B1001") && Contains("unit first, tensor w"));
  alone.training.groups() = {optim::AdamW{.lr = -1.0}};
  CHECK_THROWS_WITH(alone.training.step(), Contains("AdamW with lr = -1"));
  CHECK(alone.training.steps() == 0);
  alone.training.groups() = {optim::AdamW{}};
  CHECK(alone.training.step().norm == Approx(std::sqrt(20.0)));  // as if the refused calls had not been made
}

TEST_CASE("a run that has steps begins again only on purpose") {
  const TemporaryDirectory directory;
  TrainingOptions options{
      .stage = 3, .state = Tier::nvme, .drives = {.directories = {directory.path()}, .run = "mine"}};
  {
    LoneTraining first(options);
    CHECK_THROWS_WITH(first.training.resume(initial_parameters()), Contains("B1007") && Contains("no steps"));
    first.training.initialize(initial_parameters());
    CHECK_THROWS_WITH(first.training.initialize(initial_parameters()), Contains("B1007") && Contains("it has begun"));
    first.use_all(1.0f);
    first.training.step();
    first.training.finish();
  }
  {
    LoneTraining again(options);
    CHECK_THROWS_WITH(again.training.initialize(initial_parameters()),
                      Contains("B1007") && Contains("run \"mine\"") && Contains("resume_at {0, 0}"));
    again.training.start(initial_parameters());
    CHECK(again.training.steps() == 1);
  }
  options.drives.resume_at = RunPoint{};
  LoneTraining anew(options);
  anew.training.initialize(initial_parameters());
  CHECK(anew.training.steps() == 0);
}

TEST_CASE("a run is refused if its state is not all on drives") {
  const TemporaryDirectory directory;
  for (const Spread& state : {Spread{}, Spread(Tier::host), Spread{0.0, 0.5, 0.5}}) {
    const TrainingOptions options{
        .stage = 3, .state = state, .drives = {.directories = {directory.path()}, .run = "mine"}};
    CHECK_THROWS_WITH(LoneTraining(options),
                      Contains("B1001") && Contains("run \"mine\"") && Contains("not all on drives"));
  }
}

TEST_CASE("options of steps are refused when the training is planned") {
  const Model model{{{.name = "first", .tensors = {{"w", {10}}}}}};
  const auto refusal = [&](const optim::Rule& rule, const TrainingOptions& options) -> std::string {
    try {
      Plan(model, {}, {rule}, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  CHECK_THAT(refusal(optim::AdamW{.lr = -1.0}, {}), Contains("B1001") && Contains("lr = -1"));
  CHECK_THAT(refusal(optim::AdamW{}, {.max_norm = -1.0}), Contains("B1001") && Contains("a norm of -1"));
  CHECK_THAT(refusal(optim::AdamW{}, {.schedule = {.update_in_backward = true}, .max_norm = 1.0}),
             Contains("B1001") && Contains("update_in_backward"));
  CHECK_THAT(refusal(optim::External{}, {}), Contains("B1005") && Contains("format fp32"));
  CHECK_THAT(refusal(optim::External{}, {.format = StateFormat::fp32, .verify = 1}),
             Contains("B1005") && Contains("cannot verify updates"));
}

namespace {

struct RankChoice {
  Model model{{{.name = "first", .tensors = {{"w", {10}}, {"b", {4}}}}}};
  TrainingOptions options{.stage = 2};
  optim::AdamW rule{};
};

// Returns each rank's error, where rank 1 begins to train in another way.
std::vector<std::string> errors_if(const std::function<void(RankChoice& choice)>& change) {
  return failures_of_ranks(2, [&](Communicator& world) {
    RankChoice choice;
    if (world.rank() == 1) change(choice);
    Training(choice.model, world, {choice.rule}, choice.options);
  });
}

}  // namespace

TEST_CASE("ranks with other options, rules or parameters are refused before they exchange values") {
  const std::pair<std::function<void(RankChoice & choice)>, std::string> cases[] = {
      {[](RankChoice& rank) { rank.options.stage = 3; }, "rank 1 has another stage than rank 0"},
      {[](RankChoice& rank) { rank.options.state = Tier::host; }, "tiers of state is 0, 1, 0 on rank 1"},
      {[](RankChoice& rank) { rank.options.max_norm = 1.0; }, "max_norm is 1 on rank 1, and inf on rank 0"},
      {[](RankChoice& rank) { rank.options.micro_steps = 2; }, "another micro_steps"},
      {[](RankChoice& rank) { rank.options.trace = plain_order(rank.model); }, "another trace"},
      {[](RankChoice& rank) { rank.options.schedule.prefetch = 2; }, "another prefetch"},
      {[](RankChoice& rank) { rank.rule.lr = 0.5; }, "lr of parameter group 0 is 0.5 on rank 1, and 0.001 on rank 0"},
      {[](RankChoice& rank) { rank.rule.beta1 = 0.5; }, "another beta1 of parameter group 0"},
      {[](RankChoice& rank) { rank.model.units[0].tensors[1].shape = {5}; },
       "b of unit first, bf16 of shape [5], in parameter group 0 on rank 1, and b of unit first, bf16 of shape [4]"},
      {[](RankChoice& rank) { rank.model.units[0].tensors.pop_back(); }, "nothing on rank 1, and b of unit first"},
      {[](RankChoice& rank) { rank.model.units[0].tensors[1].frozen = true; }, "frozen"},
  };
  for (const auto& [change, words] : cases) {
    for (const std::string& error : errors_if(change))
      CHECK_THAT(error, Contains("B1001 cannot train") && Contains(words));
  }
  const auto threads = [](RankChoice& rank) { rank.options.threads = 1; };
  CHECK(errors_if(threads) == std::vector<std::string>(2));
}

TEST_CASE("a learning rate that one rank alone changes is refused before its update") {
  const auto failures = failures_of_ranks(2, [](Communicator& world) {
    Training training({{{.name = "first", .tensors = {{"w", {10}}}}}}, world, {optim::AdamW{}}, {.stage = 2});
    training.initialize(initial_parameters());
    if (world.rank() == 1) std::get<optim::AdamW>(training.groups()[0]).lr = 0.5;
    training.forward(0);
    training.backward(0);
    training.step();
  });
  for (const std::string& failure : failures)
    CHECK_THAT(failure, Contains("B1001 cannot step: rank 1 has another rule than rank 0"));
}

TEST_CASE("a rank that made another number of micro-steps tells the others so") {
  const auto failures = failures_of_ranks(2, [](Communicator& world) {
    Training training({{{.name = "first", .tensors = {{"w", {10}}}}}}, world, {optim::AdamW{}}, {.stage = 2});
    training.initialize(initial_parameters());
    training.forward(0);
    training.backward(0);
    training.step({.micro_steps = world.rank() == 1 ? 2u : 1u});
  });
  for (const std::string& failure : failures)
    CHECK_THAT(failure, Contains("B1007 cannot step with 2 micro-steps: another number was accumulated"));
}

TEST_CASE("parameter groups have rules and learning rates by name") {
  Model model;
  model.unit("first");
  model.tensor({.name = "w", .shape = {10}, .group = model.group("matrices")});
  model.tensor({.name = "b", .shape = {4}, .group = model.group("vectors")});
  CHECK(model.group("matrices") == 0);
  const auto world = single_rank();
  const optim::Sgd one{.lr = 1.0}, two{.lr = 2.0};
  Training training(model, *world, {{"vectors", two}, {"matrices", one}}, {.stage = 0});
  const auto lr = [&](std::size_t group) { return std::get<optim::Sgd>(training.groups()[group]).lr; };
  CHECK((lr(0) == 1.0 && lr(1) == 2.0));
  training.set_lr("vectors", 3.0);
  CHECK((lr(0) == 1.0 && lr(1) == 3.0));
  CHECK_THROWS_WITH(training.set_lr("others", 3.0), Contains("B1001") && Contains("\"others\"") && Contains("vectors"));
  CHECK_THROWS_WITH(Plan(model, {}, {{"matrices", one}}), Contains("B1001") && Contains("\"vectors\" has no rule"));
  CHECK_THROWS_WITH(Plan(model, {}, {{"matrices", one}, {"vectors", one}, {"others", one}}),
                    Contains("B1001") && Contains("the rule for \"others\""));
}

TEST_CASE("a trainer that goes micro-step by micro-step in a layer-major training is told so once") {
  std::string lines;
  Log log([&](Level, std::string_view line) { lines += std::string(line) + "\n"; });
  LoneTraining alone({.stage = 3, .micro_steps = 2, .schedule = {.layer_major = true}, .log = &log});
  alone.training.initialize(initial_parameters());
  for (std::size_t step = 0; step < 2; ++step) {
    for (std::size_t micro_step = 0; micro_step < 2; ++micro_step)
      alone.use_all(1.0f);
    alone.training.step();
  }
  CHECK_THAT(lines, Contains("unit second is used in forward in another order than that of Schedule::layer_major"));
  CHECK(std::ranges::count(lines, '\n') == 1);
}

TEST_CASE("drives that are not there are refused, and not made") {
  const TemporaryDirectory directory;
  const std::filesystem::path missing = directory.path() / "not" / "mounted";
  for (const char* const run : {"", "mine"}) {
    const TrainingOptions options{.stage = 3, .state = Tier::nvme, .drives = {.directories = {missing}, .run = run}};
    CHECK_THROWS_WITH(LoneTraining(options),
                      Contains("B1001") && Contains("no such directory") && Contains(missing.string()));
  }
  CHECK_FALSE(std::filesystem::exists(missing.parent_path()));
}

TEST_CASE("groups that tensors name and that are missing are refused before anything is reserved") {
  const Model model{{{.name = "first", .tensors = {{"w", {10}}, {"b", {10}, 1}}}}};
  CHECK_THROWS_WITH(Plan(model, {}, {optim::AdamW{}}), Contains("B1001") && Contains("unit first, tensor b"));
}

TEST_CASE("a rule of another kind is refused, with its group and both names") {
  LoneTraining alone({.stage = 0}, {optim::AdamW{}, optim::AdamW{}});
  alone.training.initialize(initial_parameters());
  alone.use_all(1.0f);
  alone.training.groups()[1] = optim::Lion{};
  CHECK_THROWS_WITH(alone.training.step(), Contains("B1001") && Contains("group 1") && Contains("needed:    AdamW") &&
                                               Contains("available: Lion"));
  alone.training.groups()[1] = optim::AdamW{.lr = 0.5};
  CHECK(alone.training.step().step == 1);
}

TEST_CASE("what the options of a step leave out is that of the training") {
  const std::vector<optim::Rule> rules{optim::Sgd{.lr = 1.0}};
  const auto parameters_after = [&](const auto& step) {
    LoneTraining alone({.stage = 0, .max_norm = 0.5}, rules);
    alone.training.initialize(initial_parameters());
    alone.use_all(1.0f);
    step(alone.training);
    std::vector<std::byte> bytes;
    for (std::size_t unit = 0; unit < 2; ++unit)
      add_bytes(alone.training.model().units[unit], alone.training.forward(unit), nullptr, bytes);
    return bytes;
  };
  const auto clipped = parameters_after([](Training& training) { training.step(); });
  CHECK((clipped == parameters_after([](Training& training) { training.step(StepOptions{}); })));
  CHECK((clipped == parameters_after([&](Training& training) { training.step({.groups = rules}); })));
  CHECK((clipped != parameters_after([](Training& training) { training.step({.max_norm = optim::no_clipping}); })));
}

TEST_CASE("a step averages over the micro-steps that were made, and refuses another number") {
  const double norm = std::sqrt(20.0);
  for (const std::size_t declared : {1u, 2u, 3u}) {
    for (const std::size_t made : {1u, 2u, 3u, 4u}) {
      CAPTURE(declared, made);
      LoneTraining alone({.stage = 0, .micro_steps = declared});
      alone.training.initialize(initial_parameters());
      CHECK(alone.training.step().norm == 0.0);  // nothing was accumulated
      for (std::size_t i = 0; i < made; ++i)
        alone.use_all(1.0f);
      if (made != declared) {
        const auto refusal = Contains("where:     unit first, and all other units with gradients");
        CHECK_THROWS_WITH(alone.training.gradient_norm(), refusal);
        CHECK_THROWS_WITH(alone.training.step(), refusal);
        CHECK_THROWS_WITH(alone.training.step({.micro_steps = declared}), refusal);
      }
      CHECK_THROWS_WITH(alone.training.step({.micro_steps = 0}), Contains("B1007"));
      CHECK(alone.training.gradient_norm(1.0, made) == Approx(norm));
      CHECK(alone.training.step({.micro_steps = made}).norm == Approx(norm));
      alone.use_all(1.0f);
      CHECK(alone.training.step({.micro_steps = made + 1, .discard = true}).skipped);
    }
  }
}

TEST_CASE("a step that sums micro-steps takes any number, and does not average") {
  LoneTraining alone({.stage = 0, .micro_steps = 2, .sums_micro_steps = true});
  alone.training.initialize(initial_parameters());
  for (const std::size_t made : {1u, 2u, 3u}) {
    for (std::size_t i = 0; i < made; ++i)
      alone.use_all(1.0f);
    CHECK_THROWS_WITH(alone.training.step({.micro_steps = made + 1}), Contains("B1007"));
    CHECK(alone.training.step().norm == Approx(static_cast<double>(made) * std::sqrt(20.0)));
  }
}

TEST_CASE("a trace tells how often a micro-step uses units") {
  const Trace twice{{0, Phase::forward},  {1, Phase::forward},  {0, Phase::forward},  {1, Phase::forward},
                    {1, Phase::backward}, {0, Phase::backward}, {1, Phase::backward}, {0, Phase::backward}};
  LoneTraining traced({.stage = 0, .trace = twice});
  LoneTraining declared;
  for (LoneTraining* each : {&traced, &declared}) {
    each->training.initialize(initial_parameters());
    for (const auto& [unit, phase, held, exact] : twice)
      phase == Phase::forward ? each->training.forward(unit) : each->training.backward(unit);
  }
  CHECK_NOTHROW(traced.training.step());
  CHECK_THROWS_WITH(declared.training.step(), Contains("B1007") && Contains("TrainingOptions::trace"));
}

TEST_CASE("a lease that has ended, or whose training has, gives no memory") {
  std::optional<Lease> outlives;
  {
    LoneTraining alone;
    alone.training.initialize(initial_parameters());
    Lease ended = alone.training.forward(0);
    ended.end();
    CHECK_THROWS_WITH(ended[0], Contains("B1007") && Contains("the lease has ended"));
    Lease moved = alone.training.forward(1);
    outlives.emplace(std::move(moved));
    CHECK_THROWS_WITH(moved.parameters(), Contains("B1007"));  // NOLINT(bugprone-use-after-move)
    CHECK((*outlives)[0].count() == 10);
  }
  CHECK_THROWS_WITH((*outlives)[0], Contains("B1007") && Contains("its training has ended"));
  CHECK_THROWS_WITH(outlives->parameters(), Contains("B1007"));
  CHECK_THROWS_WITH(outlives->gradients(), Contains("B1007"));
  CHECK_NOTHROW(outlives->end());
}

namespace {

// The values of two tensors after steps with gradients of 1. `left_out`: whether a step leaves the second tensor out.
std::vector<std::vector<float>> values_after(const std::vector<bool>& left_out, bool in_backward) {
  const auto backend = kernels::cpu_backend({.threads = 1});
  const auto world = lone_communicator(*backend);
  const std::vector<optim::Rule> rules{optim::AdamW{.lr = 0.1, .weight_decay = 0.1}};
  Training training({{{.name = "unit", .tensors = {{"w", {10}}, {"b", {200}}}}}}, *world, rules,
                    {.stage = 3, .tile_elements = 128, .schedule = {.update_in_backward = in_backward}});
  training.initialize(initial_parameters());
  std::vector<std::uint64_t> missed{0, 0};
  for (const bool leaves_out : left_out) {
    training.forward(0);
    const StepOptions options{.groups = rules, .missed = missed};
    if (in_backward) training.prepare(options);
    {
      const Lease lease = training.backward(0);
      for (const std::size_t tensor : {0u, 1u}) {
        for (std::size_t i = 0; i < lease.gradient(tensor).count(); ++i)
          set_value(lease.gradient(tensor), i, 1.0f);
      }
      if (leaves_out) training.leave_out(0, 1);
    }
    in_backward ? training.step() : training.step(options);
    missed[1] += leaves_out ? 1 : 0;
  }
  const Lease lease = training.forward(0);
  std::vector<std::vector<float>> values(2);
  for (const std::size_t tensor : {0u, 1u}) {
    for (std::size_t i = 0; i < lease[tensor].count(); ++i)
      values[tensor].push_back(value_of(lease[tensor], i));
  }
  return values;
}

}  // namespace

TEST_CASE("a tensor that is left out stays as it is, and counts its own steps") {
  const bool in_backward = GENERATE(false, true);
  const auto never = values_after({}, in_backward), twice = values_after({false, false}, in_backward);
  const auto four_times = values_after({false, false, false, false}, in_backward);
  const auto found = values_after({true, false, true, false}, in_backward);
  CHECK(found[0] == four_times[0]);
  CHECK(found[1] == twice[1]);
  CHECK(values_after({true}, in_backward)[1] == never[1]);
}

TEST_CASE("tensors that are not there cannot be left out, nor have missed steps") {
  LoneTraining alone;
  alone.training.initialize(initial_parameters());
  CHECK_THROWS_WITH(alone.training.leave_out(0, 1),
                    Contains("B1001 cannot leave out tensor 1") && Contains("unit first"));
  alone.use_all(1.0f);
  const std::vector<std::uint64_t> one{0}, too_many{0, 1};
  const std::vector<optim::Rule>& rules = alone.training.groups();
  CHECK_THROWS_WITH(alone.training.step({.groups = rules, .missed = one}), Contains("B1003") && Contains("2 counts"));
  CHECK_THROWS_WITH(alone.training.step({.groups = rules, .missed = too_many}), Contains("more steps than there were"));
  CHECK(alone.training.step().step == 1);
}

TEST_CASE("a lease gives tensors by number, and refuses those that it does not have") {
  LoneTraining alone;
  alone.training.initialize(initial_parameters());
  {
    const Lease lease = alone.training.forward(0);
    CHECK(lease[0].count() == 10);
    CHECK_THROWS_WITH(lease[1], Contains("unit first") && Contains("a number below 1"));
    CHECK_THROWS_WITH((lease[{1, 0}]), Contains("B1001") && Contains("a tensor of unit 0, or one that is tied to it"));
    CHECK_THROWS_WITH(lease.gradient(0), Contains("in backward"));
  }
}

TEST_CASE("a trainer names its tensors, also those that are tied, by what the model returned for them") {
  Model model;
  model.unit("embedding", DType::fp32);
  const TensorId table = model.tensor({"table", {10, 2}});
  const std::size_t head = model.unit("head", DType::fp32);
  const TensorId norm = model.tensor({"norm", {2}});
  const TensorId out = model.tied("out", table);
  CHECK(out == TensorId{0, 0});
  CHECK(norm == TensorId{1, 0});
  CHECK(head == 1);

  const auto world = single_rank();
  Training training(model, *world, {optim::Sgd{.lr = 9.0}}, {.stage = 3});
  training.start([](std::size_t, std::size_t, Range, const View& to) { std::ranges::fill(to.as<float>(), 1.0f); });
  training.set_lr(0.5);
  CHECK_THROWS_WITH((training.forward(0)[norm]), Contains("B1001") && Contains("unit embedding"));
  training.forward(1);
  {
    const Lease lease = training.backward(head);
    CHECK(lease[out].count() == 20);
    CHECK(lease[out].as<float>()[7] == 1.0f);
    CHECK(lease[norm].count() == 2);
    lease.gradient(out).as<float>()[7] += 1.0f;
    lease.gradient(norm).as<float>()[0] += 1.0f;
    CHECK_THROWS_WITH((lease[{1, 1}]), Contains("unit head") && Contains("a number below 1"));
  }
  training.backward(0).gradient(table).as<float>()[7] += 1.0f;
  const StepResult result = training.step();
  CHECK(training.forward(0)[table].as<float>()[7] == 0.0f);
  CHECK(training.forward(1)[norm].as<float>()[0] == 0.5f);
  CHECK_THAT(to_text(result), Contains("step 1  norm 2.236  ") && Contains("device ") && !Contains("\n"));
}

TEST_CASE("a training tells of its drives in the log of its options") {
  const TemporaryDirectory directory;
  std::string lines;
  Log log([&](Level, std::string_view line) { lines += line; });
  LoneTraining(
      {.stage = 3, .state = Tier::nvme, .drives = {.directories = {directory.path()}, .run = "mine"}, .log = &log});
  CHECK_THAT(lines, Contains("begins run \"mine\""));
}

TEST_CASE("updates in backward refuse clipping and a loss scale, and report gradients that are not finite") {
  LoneTraining alone({.stage = 0, .schedule = {.update_in_backward = true}});
  alone.training.initialize(initial_parameters());
  CHECK_THROWS_WITH(alone.training.step(StepOptions{.groups = alone.training.groups()}),
                    Contains("prepare(options) before"));
  CHECK_THROWS_WITH(alone.training.prepare({.groups = alone.training.groups(), .max_norm = 1.0}),
                    Contains("no max_norm"));
  CHECK_THROWS_WITH(alone.training.step(1024.0), Contains("loss scale of 1024") && Contains("not scaled"));
  alone.use_all(INFINITY);
  const StepResult result = alone.training.step();
  CHECK_FALSE(result.skipped);
  CHECK_THAT(result.reason, Contains("not finite"));
  CHECK(result.step == 1);
}

TEST_CASE("a trace has a row for each lane that was used, with its operations") {
  LoneTraining alone({.stage = 0, .keeps_timeline = true});
  alone.training.initialize(initial_parameters());
  alone.use_all(1.0f);
  alone.training.step();
  alone.training.finish();
  const std::string trace = alone.training.chrome_trace();
  CHECK(trace.front() == '[');
  for (const char* row : {"compute", "reduce", "update"})
    CHECK_THAT(trace, Contains("\"name\":\"" + std::string(row) + "\""));
  CHECK_THAT(trace,
             Contains("update second tile 0") && Contains("use first") && Contains("wait") && !Contains("gather"));
  CHECK_THROWS_WITH(LoneTraining().training.chrome_trace(), Contains("keeps_timeline"));
  for (const UnitWork& work : alone.training.unit_work()) {
    CHECK(work.forward_seconds > 0.0);
    CHECK(work.backward_seconds > 0.0);
  }
}

TEST_CASE("a step's metrics hold the bytes of its lanes and the trainer's waits") {
  LoneTraining alone;
  alone.training.initialize(initial_parameters());
  for (int step = 0; step < 3; ++step) {
    alone.use_all(1.0f);
    alone.training.step();
    alone.training.finish();
  }
  alone.use_all(1.0f);
  const Metrics metrics = alone.training.step().metrics;
  const auto at = [](Lane lane) { return static_cast<std::size_t>(lane); };
  CHECK(metrics.bytes[at(Lane::reduce)] == 2 * (256 + 256 + 512));  // clears, reads and writes
  CHECK(metrics.bytes[at(Lane::disk)] == 0);
  CHECK(metrics.busy[at(Lane::compute)] > 0.0);
  CHECK(metrics.stalls[at(Lane::reduce)] > 0.0);
  CHECK(metrics.exposed[2] > 0.0);
  CHECK(metrics.seconds > 0.0);
  CHECK(metrics.memory == bytes_by_tier(alone.training.ledger()));
  CHECK(metrics.memory[0] > 0);
  CHECK_THAT(to_text(metrics), Contains("reduce") && Contains("exposed   forward") && Contains("memory    device") &&
                                   !Contains("disk") && !Contains("nvme"));
}

TEST_CASE("a loss scale does not change the norm") {
  const auto norm = [](double scale) {
    LoneTraining alone;
    alone.training.initialize(initial_parameters());
    alone.use_all(static_cast<float>(scale));
    return alone.training.step(scale).norm;
  };
  CHECK(norm(1.0) == norm(1024.0));
}

TEST_CASE("a record that cannot be read ends the training on all ranks, is named, and costs no committed step") {
  const TemporaryDirectory directory;
  Setup setup{.placement = placement_of_stage(3, 2), .steps = 3};
  setup.placement.state = Tier::nvme;
  setup.directory = directory.path();
  train(setup);
  const std::vector<std::string> failures = failures_of_ranks(2, [&](Communicator& world) {
    TrainingOptions options{.stage = 3,
                            .state = Tier::nvme,
                            .drives = {.directories = {directory.path()}, .run = "test"},
                            .tile_elements = 256};
    const Model model = odd_model();
    Training training(model, world, {optim::AdamW{}, optim::AdamW{}}, options);
    training.start(initial_parameters());
    if (world.rank() == 1) std::filesystem::resize_file(directory.path() / "test-rank-1" / "state.records", 200'000);
    SyntheticTrainer trainer(model, world.rank());
    for (std::size_t step = 0; step < 3; ++step) {
      trainer.run(training, step);
      training.step();
    }
    training.finish();
  });
  CHECK_THAT(failures[1], Contains("B3201") && Contains("test-rank-1") && Contains("of step"));
  CHECK_THAT(failures[0], Contains("B3301") && Contains("rank 1"));
}

TEST_CASE("a rank that stops in the middle of a step keeps no rank waiting") {
  for (const int stage : {2, 3}) {
    const std::vector<std::string> failures = failures_of_ranks(2, [&](Communicator& world) {
      const Model model = odd_model();
      Training training(model, world, {optim::AdamW{}, optim::AdamW{}}, {.stage = stage});
      training.initialize(initial_parameters());
      SyntheticTrainer trainer(model, world.rank());
      trainer.run(training, 0);
      training.step();
      if (world.rank() == 0) {
        trainer.run(training, 1);
        training.step();
        training.finish();
        return;
      }
      for (const Visit& visit : plain_order(model)) {
        if (visit.phase == Phase::forward) {
          training.forward(visit.unit);
        } else {
          training.backward(visit.unit);
          return;
        }
      }
    });
    CHECK(failures[1].empty());
    CHECK_THAT(failures[0], Contains("B3301 rank 1") && Contains("in the middle of a step"));
  }
}

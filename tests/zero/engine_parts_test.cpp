// Tests of small parts of the engine, each alone.
#include <fmt/format.h>
#include <sched.h>

#include <array>
#include <catch2/catch.hpp>
#include <thread>

#include "kernels/runtime/machine.h"
#include "tests/comm/test_groups.h"
#include "tests/skip.h"
#include "tests/zero/training_rig.h"
#include "zero/agreed_options.h"
#include "zero/engine/op_executor.h"
#include "zero/engine/scheduler.h"
#include "zero/engine/slots.h"
#include "zero/engine/step_counters.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

TEST_CASE("counters sum the bytes of lanes for each step") {
  const Placement placement;
  StepCounters counters(placement, nullptr, nullptr);
  StepRun run;
  const Op clear{.kind = OpKind::clear, .lane = Lane::host, .to = {0, 0, 100}};
  const auto now = std::chrono::steady_clock::now();
  counters.count(clear, now, now + std::chrono::milliseconds(5));
  counters.wait(run, Phase::backward, Lane::disk, [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
  const Metrics first = counters.end_step(counters.totals());
  CHECK(first.bytes[static_cast<std::size_t>(Lane::host)] == 100);
  CHECK(first.busy[static_cast<std::size_t>(Lane::host)] == Approx(0.005));
  CHECK(first.exposed[static_cast<std::size_t>(Phase::backward)] >= 0.002);
  CHECK(first.stalls[static_cast<std::size_t>(Lane::disk)] == first.exposed[static_cast<std::size_t>(Phase::backward)]);
  CHECK(counters.own_seconds() == first.own_seconds());
  counters.count_off_plan_step();
  const Metrics second = counters.end_step(counters.totals());
  CHECK(second.bytes[static_cast<std::size_t>(Lane::host)] == 0);
  CHECK(second.on_demand == 1);
  CHECK(second.exposed == std::array<double, phase_count>{});
}

TEST_CASE("a wait that fails is not counted") {
  const Placement placement;
  StepCounters counters(placement, nullptr, nullptr);
  StepRun run;
  CHECK_THROWS(counters.wait(run, Phase::step, Lane::host, [] { fail(Code::internal, {.what = "planted"}); }));
  CHECK(counters.totals().stalls == std::array<double, lane_count>{});
}

namespace {

// Lets the calling thread, one rank of a test, use these cores only.
void use_cores(std::span<const int> cores) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int core : cores)
    CPU_SET(static_cast<std::size_t>(core), &mask);
  sched_setaffinity(0, sizeof mask, &mask);
}

}  // namespace

TEST_CASE("ranks divide the cores that they share, and no others") {
  const std::vector<int> cores = allowed_cores();
  if (cores.size() < 2) skip("this machine has one core");
  const int all = static_cast<int>(cores.size());
  std::array<int, 2> shared{}, with_gpus{}, apart{}, named{}, parts{};
  const auto failures = failures_of_ranks(2, [&](Communicator& world) {
    const std::size_t rank = world.rank();
    shared[rank] = threads_of_rank(world, {});
    with_gpus[rank] = threads_of_rank(world, {.gpu = 0});
    named[rank] = threads_of_rank(world, {.threads = 3 * all});
    const auto alone = single_rank();
    TrainingOptions part;
    part.norm_group = &world;
    parts[rank] = threads_of_rank(*alone, part);
    use_cores(rank == 0 ? std::span(cores).first(1) : std::span(cores).subspan(1));
    apart[rank] = threads_of_rank(world, {});
  });
  CHECK(failures == std::vector<std::string>(2));
  CHECK(shared == std::array{all / 2, all / 2});
  CHECK(with_gpus == std::array{std::max(all / 2 - 1, 1), std::max(all / 2 - 1, 1)});  // one launches kernels
  CHECK(named == std::array{3 * all, 3 * all});
  CHECK(parts == shared);
  CHECK(apart == std::array{1, all - 1});
}

TEST_CASE("only the first failure is kept, with its operation, and it reaches the other ranks") {
  const std::vector<std::string> failures = failures_of_ranks(2, [](Communicator& ranks) {
    const Model model = plain_model(2);
    Mesh mesh = make_mesh(ranks, {.shards = 2});
    const auto order = std::make_shared<ExchangeOrder>();
    ExchangeTurns exchanges(order, 2);
    exchanges.add(&model);
    FirstFailure failure(model, mesh, exchanges);
    failure.check();
    if (ranks.rank() == 1) return mesh.barrier();
    for (const std::size_t unit : {1u, 0u}) {
      try {
        try {
          fail(Code::internal, {.what = fmt::format("planted in {}", unit)});
        } catch (...) {
          failure.fail({.kind = OpKind::update, .unit = unit});
        }
      } catch (const Error&) {
      }
    }
    const Sequencer::Party other;
    order->turns().add(other, &mesh);
    order->turns().await(other, &mesh);  // the turn before it was cancelled
    failure.check();
  });
  CHECK_THAT(failures[0], Contains("planted in 1") && Contains("unit h.1, update of step"));
  CHECK_THAT(failures[1], Contains("B3301") && Contains("planted in 1"));
}

TEST_CASE("when ranks go off plan with different uses, the error names both") {
  const auto failures_of_rendezvous = [](std::size_t unit_of_rank_1) {
    return failures_of_ranks(2, [=](Communicator& ranks) {
      Mesh mesh = make_mesh(ranks, {.shards = 2});
      const std::size_t unit = ranks.rank() == 1 ? unit_of_rank_1 : 0;
      rendezvous({.kind = OpKind::meet, .lane = Lane::reduce}, off_plan_position(3, unit, Phase::backward), mesh,
                 plain_model(2));
    });
  };
  CHECK(failures_of_rendezvous(0) == std::vector<std::string>(2));
  CHECK_THAT(failures_of_rendezvous(1)[0],
             Contains("B1007") && Contains("unit h.0 in backward") && Contains("unit h.1 in backward"));
  CHECK_THAT(failures_of_rendezvous(none)[1], Contains("B1007") && Contains("calls step()"));
}

TEST_CASE("a program that replaces the plan's reports its own memory") {
  const CompiledPlan plan = plan_of({.model = odd_model(), .placement = {}});
  RunningProgram running(plan);
  CHECK(&running.program() == &plan.program());
  CHECK(running.memory() == bytes_by_tier(ledger_of(plan.program(), plan.blocks().records())));
  Trace twice = trace_of(plan.input());
  twice.push_back({0, Phase::forward});
  running.change_to(running.compile_for(twice, true), twice, true);
  CHECK(&running.program() != &plan.program());
  CHECK(running.input().trace == twice);
  CHECK(running.memory() == bytes_by_tier(ledger_of(running.program(), plan.blocks().records())));
}

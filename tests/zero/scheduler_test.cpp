// Tests of the scheduler alone, with lists written by hand and operations that only note that they were done.
#include "zero/engine/scheduler.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <mutex>
#include <thread>

#include "tests/plan/plan_rig.h"
#include "zero/comm/thread_communicator.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

Op op(OpKind kind, Lane lane, std::size_t unit, std::vector<Wait> after = {}) {
  return {.kind = kind, .lane = lane, .unit = unit, .after = std::move(after)};
}

// A scheduler of one rank. Operations are noted by unit when they are done; those of `held_unit` wait for
// release_held().
class SchedulerRig {
 public:
  explicit SchedulerRig(std::vector<Op> list) : list_(std::move(list)) { scheduler.follow_program(list_); }
  ~SchedulerRig() {
    release_held();
    scheduler.abandon_uses();
    threads.stop();
  }

  std::vector<std::size_t> done() {
    const std::lock_guard lock(mutex_);
    return done_;
  }

  void release_held() {
    if (held_) held_->finish();
    held_.reset();
  }

  std::size_t held_unit = 99;  // no unit
  std::size_t failing_unit = 99;

 private:
  void execute(const IssuedOp& issued) {
    try {
      for (const OpStatus* status : issued.after) {
        status->wait_in(ExecContext(*backend_));
      }
      if (issued.op.unit == held_unit) go_.wait();
      if (issued.op.unit == failing_unit) fail(Code::internal, {.what = "the planted failure"});
    } catch (...) {
      failure_.fail(issued.op);
    }
    const std::lock_guard lock(mutex_);
    done_.push_back(issued.op.unit);
  }

  std::vector<Op> list_;
  std::optional<offload::Promise> held_{std::in_place};
  offload::Completion go_ = held_->completion();
  std::mutex mutex_;
  std::vector<std::size_t> done_;
  Model model_ = plain_model(9);
  Placement placement_{};
  std::unique_ptr<kernels::Backend> backend_ = kernels::cpu_backend({.threads = 1});
  std::unique_ptr<Communicator> world_ = lone_communicator(*backend_);
  Mesh mesh_ = make_mesh(*world_, placement_);
  ExchangeTurns exchanges_{nullptr, 1};
  FirstFailure failure_{model_, mesh_, exchanges_};
  ExecContext trainer_{*backend_};

 public:
  StepCounters counters{placement_, nullptr, nullptr};
  LaneThreads threads{nullptr};
  Scheduler scheduler{{.threads = threads,
                       .trainer = trainer_,
                       .exchanges = exchanges_,
                       .counters = counters,
                       .failure = failure_,
                       .execute = [this](const IssuedOp& issued) { execute(issued); }}};
};

}  // namespace

TEST_CASE("operations are issued up to the trainer's use, and continue when it ends") {
  SchedulerRig rig({op(OpKind::gather, Lane::gather, 0), op(OpKind::use, Lane::compute, 1, {{0}}),
                    op(OpKind::reduce, Lane::reduce, 2, {{1}}), op(OpKind::agree, Lane::reduce, none),
                    op(OpKind::update, Lane::update, 3, {{3}})});
  rig.scheduler.issue_up_to_trainer();
  CHECK(rig.scheduler.position() == 1);
  CHECK(rig.scheduler.uses_next({{1, Phase::step}}));
  CHECK_FALSE(rig.scheduler.uses_next({{2, Phase::step}}));
  const std::size_t use = rig.scheduler.uses().next_number();
  CHECK(rig.scheduler.begin_use().unit == 1);
  CHECK(rig.done() == std::vector<std::size_t>{0});
  CHECK_THROWS_WITH(rig.scheduler.finish(), Contains("B1007") && Contains("leases"));
  rig.scheduler.end_use(use);
  CHECK(rig.scheduler.is_at_agreement());
  rig.scheduler.issue_rest();
  rig.scheduler.finish();
  CHECK(rig.done().size() == 4);
  CHECK(rig.done()[1] == 2);
}

TEST_CASE("an operation waits for operations of other lanes and of the last step") {
  SchedulerRig rig(
      {op(OpKind::clear, Lane::host, 0), op(OpKind::clear, Lane::update, 1, {{.op = 0, .is_last_steps = true}})});
  rig.held_unit = 0;
  rig.scheduler.issue_rest();
  rig.scheduler.begin_step();  // this does not wait for the step before
  rig.scheduler.issue_rest();
  rig.scheduler.run().ops[1].begun.wait_for(std::chrono::milliseconds(20));
  CHECK(rig.done() == std::vector<std::size_t>{1});  // the operation of the first step, which waited for nothing
  rig.release_held();
  rig.scheduler.finish();
  CHECK(rig.done().size() == 4);
  CHECK(rig.done()[1] == 0);
}

TEST_CASE("waiting for a unit's parameters waits for its marked operations of the last step, and for no others") {
  Op marked = op(OpKind::update, Lane::update, 1);
  marked.is_marked = true;
  SchedulerRig rig({op(OpKind::clear, Lane::host, 0), marked, op(OpKind::clear, Lane::update, 2)});
  rig.held_unit = 1;
  rig.scheduler.issue_rest();
  rig.scheduler.begin_step();
  rig.scheduler.wait_for_parameters(2);  // comes after the operation that is held, but is not marked
  std::atomic<bool> has_waited = false;
  std::thread waiting([&] {
    rig.scheduler.wait_for_parameters(1);
    has_waited = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_FALSE(has_waited.load());
  rig.release_held();
  waiting.join();
  CHECK(has_waited.load());
}

TEST_CASE("every wait throws the first error of any lane") {
  SchedulerRig rig({op(OpKind::clear, Lane::host, 0), op(OpKind::norm, Lane::update, 1, {{0}})});
  rig.failing_unit = 0;
  rig.scheduler.issue_rest();
  CHECK_THROWS_WITH(rig.scheduler.wait_for(1), Contains("the planted failure") && Contains("unit h.0, clear of step"));
  CHECK_THROWS_WITH(rig.scheduler.finish(), Contains("the planted failure"));
  CHECK(rig.done().empty());
}

TEST_CASE("another list is followed to the end of the step, and then the program again") {
  SchedulerRig rig({op(OpKind::clear, Lane::host, 0), op(OpKind::use, Lane::compute, 1)});
  rig.scheduler.issue_up_to_trainer();
  rig.scheduler.finish();
  const std::vector<Op> served{op(OpKind::clear, Lane::host, 5), op(OpKind::use, Lane::compute, 6)};
  rig.scheduler.follow_in_this_step(served, off_plan_position(0, 6, Phase::step));
  CHECK(rig.scheduler.begin_use().unit == 6);
  rig.scheduler.end_use(0);
  CHECK(rig.scheduler.run().position == OffPlanPosition{0, 7, 2});
  rig.scheduler.begin_step();
  rig.scheduler.issue_up_to_trainer();
  rig.scheduler.finish();
  CHECK(rig.done() == std::vector<std::size_t>{0, 5, 0});
}

TEST_CASE("uses end in the order in which they began") {
  SchedulerRig rig(
      {op(OpKind::use, Lane::compute, 0), op(OpKind::use, Lane::compute, 1), op(OpKind::clear, Lane::host, 2, {{1}})});
  rig.scheduler.begin_use();
  rig.scheduler.begin_use();
  rig.scheduler.end_use(1);
  CHECK_FALSE(rig.scheduler.run().ops[1].begun.is_done());
  rig.scheduler.end_use(0);
  CHECK(rig.scheduler.run().ops[1].begun.is_done());
  rig.scheduler.finish();
  CHECK(rig.done() == std::vector<std::size_t>{2});
}

// Tests of the order in which exchanges become free of the trainer.
#include "zero/engine/scheduler.h"

#include <catch2/catch.hpp>

using namespace ballast;

namespace {

// Issued operations of one training, in an order that it may share.
class Issuing {
 public:
  explicit Issuing(std::shared_ptr<ExchangeOrder> order) : turns_(std::move(order), 1) {}

  OpStatus& use() {
    OpStatus& status = ops_.emplace_back();
    status.is_free = false;
    return status;
  }
  void end(OpStatus& use) {
    use.is_free = true;
    freed_.look();
  }
  OpStatus& exchange(Lane lane, std::vector<const OpStatus*> after = {}) { return add(lane, std::move(after), true); }
  OpStatus& other(Lane lane, std::vector<const OpStatus*> after = {}) { return add(lane, std::move(after), false); }

 private:
  OpStatus& add(Lane lane, std::vector<const OpStatus*> after, bool takes_turns) {
    OpStatus& status = ops_.emplace_back();
    const Op op{.kind = takes_turns ? OpKind::gather : OpKind::upload, .lane = lane};
    freed_.add({op, status, run_, std::move(after), takes_turns});
    return status;
  }

  ExchangeTurns turns_;
  FreedOps freed_{turns_};
  StepRun run_;
  std::deque<OpStatus> ops_;  // keeps addresses
};

}  // namespace

TEST_CASE("exchanges take turns in the order in which the trainer frees them") {
  const auto order = std::make_shared<ExchangeOrder>();
  Issuing one(order), other(order);
  OpStatus& use = one.use();
  OpStatus& held = one.exchange(Lane::gather, {&use});
  const OpStatus& first = other.exchange(Lane::gather);
  const OpStatus& behind = one.exchange(Lane::gather);  // a held exchange is before it in its lane
  OpStatus& copy = one.other(Lane::upload, {&held});
  const OpStatus& through = one.exchange(Lane::reduce, {&copy});
  const OpStatus& second = other.exchange(Lane::reduce, {&first});
  one.end(use);
  const OpStatus& last = other.exchange(Lane::gather);
  const Sequencer::Party any;
  for (const OpStatus* turn : {&first, &second, static_cast<const OpStatus*>(&held), &behind, &through, &last}) {
    CHECK(order->turns().await(any, turn));  // would wait for ever in another order
    order->turns().done();
  }
}

// Tests of the queue by which a lane knows what it exchanges next.
#include "zero/engine/send_ahead.h"

#include <catch2/catch.hpp>
#include <optional>

using namespace ballast;

namespace {

constexpr Piece gradients(std::size_t slot) { return {slot, 0, 100}; }

// The operations of a list, all in one lane.
class Rig {
 public:
  explicit Rig(std::vector<Op> list) : list_(std::move(list)), statuses_(list_.size()) {
    for (std::size_t i = 0; i < list_.size(); ++i) {
      IssuedOp issued{list_[i], statuses_[i], run_};
      for (const Wait& wait : list_[i].after) {
        issued.after.push_back(&outside_.at(wait.op));
      }
      queue.issued(issued);
    }
  }

  // Let the list wait for an operation of another lane.
  void hold(std::size_t operation) { outside_[operation].begun = held_->completion(); }
  void release() { held_->finish(); }

  void begin(std::size_t i) { queue.begun(list_[i]); }
  std::optional<std::size_t> next() {
    const Op* const op = queue.next_exchange();
    return op == nullptr ? std::nullopt : std::optional(static_cast<std::size_t>(op - list_.data()));
  }

  LaneQueue queue{};

 private:
  std::optional<offload::Promise> held_{std::in_place};
  std::vector<Op> list_;
  std::vector<OpStatus> statuses_;
  std::vector<OpStatus> outside_ = std::vector<OpStatus>(4);
  StepRun run_{};
};

Op reduce(std::size_t from, std::size_t to, std::vector<Wait> after = {}) {
  return {.kind = OpKind::reduce, .lane = Lane::reduce, .from = gradients(from), .to = gradients(to), .after = after};
}

Op local(OpKind kind, std::size_t from, std::size_t to) {
  return {.kind = kind, .lane = Lane::reduce, .from = gradients(from), .to = gradients(to)};
}

}  // namespace

TEST_CASE("a lane's next exchange is found behind operations that compute") {
  Rig rig({reduce(0, 2), local(OpKind::norm, 2, 9), local(OpKind::clear, 7, 0), reduce(1, 3), reduce(0, 4)});
  rig.begin(0);
  CHECK(rig.next() == 3);
  for (const std::size_t begun : {1u, 2u}) {
    rig.begin(begun);
    CHECK(rig.next() == 3);
  }
  rig.begin(3);
  CHECK(rig.next() == 4);
  rig.begin(4);
  CHECK(rig.next() == std::nullopt);
}

TEST_CASE("an exchange is not next before what it waits for is done") {
  Rig rig({reduce(0, 2), reduce(1, 3, {{.op = 1}})});
  rig.hold(1);
  rig.begin(0);
  CHECK(rig.next() == std::nullopt);
  rig.release();
  CHECK(rig.next() == 1);
}

TEST_CASE("an exchange is not next while the lane still writes what it sends") {
  Rig sums({reduce(0, 2), reduce(2, 3)});
  sums.begin(0);
  CHECK(sums.next() == std::nullopt);
  Rig added({reduce(0, 2), local(OpKind::accumulate, 2, 5), reduce(5, 6)});
  added.begin(0);
  CHECK(added.next() == std::nullopt);
  added.begin(1);
  CHECK(added.next() == std::nullopt);
}

TEST_CASE("pieces of one slot that do not overlap may be written") {
  Op second = reduce(2, 3);
  second.from = {2, 100, 50};
  Rig rig({reduce(0, 2), second});
  rig.begin(0);
  CHECK(rig.next() == 1);
}

TEST_CASE("no exchange overtakes another one of its lane") {
  Rig rig({reduce(0, 2), {.kind = OpKind::agree, .lane = Lane::reduce, .to = gradients(9)}, reduce(1, 3)});
  rig.begin(0);
  CHECK(rig.next() == 1);
}

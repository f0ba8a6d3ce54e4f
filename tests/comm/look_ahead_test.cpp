// Tests of collectives that know which one comes next. Between hosts its first bytes are sent before it begins, and no bit changes.
#include "zero/comm/call.h"

#include <catch2/catch.hpp>
#include <memory>
#include <random>

#include "tests/comm/rank_values.h"
#include "tests/comm/test_groups.h"
#include "tests/sanitizer.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

// A gather or a scatter, with this rank's values and memory for the result.
struct Turn {
  Turn(std::size_t rank, std::size_t ranks, bool is_gather, std::size_t of_rank)
      : gathers(is_gather),
        count(of_rank),
        mine(Values::of_rank(rank, DType::bf16, gathers ? count : ranks * count)),
        result(gathers ? DType::bf16 : DType::fp32, gathers ? ranks * count : count) {}

  void call(Communicator& group) {
    gathers ? group.all_gather(mine.view(), result.view()) : group.reduce_scatter(mine.view(), result.view());
  }

  NextCollective announced() {
    const Collective kind = gathers ? Collective::all_gather : Collective::reduce_scatter;
    return {.kind = kind, .sent = mine.view(), .count = count};
  }

  bool gathers;
  std::size_t count;  // elements of a rank's part
  Values mine, result;
};

// Sizes from nothing to several chunks.
std::vector<Turn> turns_of(const Communicator& ranks) {
  std::mt19937 random(3);
  std::vector<Turn> turns;
  for (const std::size_t count : {0u, 1u, 1000u, 300'000u, 7'000'000u, 40u, 3'000'000u, 5'000'000u, 2u, 2'000'000u}) {
    const std::size_t large = 100'000;
    turns.emplace_back(ranks.rank(), ranks.size(), random() % 2 == 0, count < large ? count : count / every(4));
  }
  return turns;
}

// Announces the turn after the one that is made; not always, and not on all ranks.
class Announcer : public LookAhead {
 public:
  Announcer(std::vector<Turn>& turns, std::size_t rank) : turns_(turns), random_(static_cast<unsigned>(rank)) {}

  std::optional<NextCollective> next() override {
    ++asked;
    if (turn + 1 == turns_.size() || random_() % 3 == 0) return std::nullopt;
    return turns_[turn + 1].announced();
  }

  std::size_t turn = 0;
  std::size_t asked = 0;

 private:
  std::vector<Turn>& turns_;
  std::mt19937 random_;
};

// Announces one turn, again and again.
struct Announced : LookAhead {
  explicit Announced(Turn& of) : turn(of) {}
  std::optional<NextCollective> next() override { return turn.announced(); }
  Turn& turn;
};

}  // namespace

TEST_CASE("collectives that are announced give the same bits") {
  for (const GroupShape& shape : {GroupShape{2}, GroupShape{3}, GroupShape{4, 2}}) {
    on_all_groups(shape, [](Communicator& ranks) {
      std::vector<Turn> plain = turns_of(ranks), announced = turns_of(ranks);
      for (Turn& turn : plain) {
        turn.call(ranks);
      }
      Announcer announcer(announced, ranks.rank());
      ranks.use_look_ahead(&announcer);
      for (; announcer.turn < announced.size(); ++announcer.turn) {
        announced[announcer.turn].call(ranks);
      }
      ranks.use_look_ahead(nullptr);
      for (std::size_t i = 0; i < plain.size(); ++i) {
        expect(announced[i].result == plain[i].result, "other bits");
      }
      ranks.barrier();
    });
  }
}

TEST_CASE("a rank that is joined by links asks for the next collective if its caller can tell") {
  for (const GroupKind& kind : group_kinds()) {
    if (kind.name != "gloo") continue;
    CHECK(kind.run(2, patient, [](Communicator& ranks) {
      std::vector<Turn> turns = turns_of(ranks);
      Announcer announcer(turns, ranks.rank());
      if (ranks.rank() == 0) ranks.use_look_ahead(&announcer);
      for (; announcer.turn < turns.size(); ++announcer.turn) {
        turns[announcer.turn].call(ranks);
      }
      ranks.use_look_ahead(nullptr);
      expect((announcer.asked > 0) == (ranks.rank() == 0), "it was not asked");
    }) == Failures(2));
  }
}

TEST_CASE("another collective than the one that was sent ahead fails on all ranks") {
  for (const GroupKind& kind : group_kinds()) {
    if (kind.name != "gloo") continue;
    const Failures failures = kind.run(2, patient, [](Communicator& ranks) {
      Turn first(ranks.rank(), 2, true, 1000), second(ranks.rank(), 2, true, 2000);
      Announced announced(second);
      if (ranks.rank() == 0) ranks.use_look_ahead(&announced);
      first.call(ranks);
      ranks.barrier();
    });
    CHECK_THAT(failures[0] + failures[1], Contains("another one has been sent ahead") || Contains("B1003 rank 0"));
    CHECK((!failures[0].empty() && !failures[1].empty()));
  }
}

// Gloo reads values until they are sent. So the group ends before they are freed.
TEST_CASE("values of an announced collective that does not come can be freed") {
  for (const GroupKind& kind : group_kinds()) {
    if (kind.name != "gloo") continue;
    const Failures failures = kind.run(2, patient, [](Communicator& ranks) {
      Turn first(ranks.rank(), 2, true, 1000);
      auto second = std::make_unique<Turn>(ranks.rank(), 2, true, 20'000'000);
      Announced announced(*second);
      if (ranks.rank() == 0) ranks.use_look_ahead(&announced);
      first.call(ranks);
      if (ranks.rank() == 1) return second->call(ranks);
      ranks.use_look_ahead(nullptr);
      second.reset();
      ranks.barrier();
    });
    for (const std::string& failure : failures) {
      CHECK_THAT(failure, Contains("B3301") && Contains("rank 0") && Contains("whose first bytes it had sent"));
    }
  }
}

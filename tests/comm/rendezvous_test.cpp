#include "zero/comm/hub.h"

#include <catch2/catch.hpp>
#include <utility>

using namespace ballast;
using Catch::Contains;
using Kind = Message::Kind;

namespace {

// A rendezvous of three ranks, and the messages that it sent.
struct Rig {
  std::string machine = "here";  // the machine of the ranks from 1 on
  std::size_t size = 3;
  Rendezvous rendezvous{"job", size,
                        [this](std::size_t to, const Message& message) { sent.emplace_back(to, message); }};
  std::vector<std::pair<std::size_t, Message>> sent{};

  void hello(std::size_t connection, std::size_t rank, std::size_t size = 3, const std::string& job = "job") {
    rendezvous.take(connection,
                    {Kind::hello, job,
                     to_line({rank, size, "node", static_cast<pid_t>(100 + rank), rank == 0 ? "here" : machine})});
  }
  void all_come() {
    for (std::size_t rank = 0; rank < size; ++rank) {
      hello(10 + rank, rank, size);
    }
    sent.clear();
  }
  void late(std::size_t rank, std::size_t waited_for) {
    rendezvous.take(10 + rank, {Kind::late, "", std::to_string(waited_for)});
  }
  void waits(std::size_t rank, std::size_t waited_for) {
    rendezvous.take(10 + rank, {Kind::waits, "", std::to_string(waited_for)});
  }
  std::string last() const { return sent.empty() ? "" : sent.back().second.value; }
  std::vector<std::size_t> ranks() const { return ranks_from(sent.back().second.key); }
};

}  // namespace

TEST_CASE("all ranks are welcomed when the last one has connected") {
  Rig rig;
  rig.hello(1, 2);
  rig.hello(2, 0);
  CHECK(rig.sent.empty());
  rig.hello(3, 1);
  CHECK(rig.rendezvous.complete());
  CHECK(rig.sent.size() == 3);
  CHECK(rig.sent[0].second == Message{Kind::welcome, "", "0 3 100 node here 0\n1 3 101 = = 0\n2 3 102 = = 0"});
}

TEST_CASE("a rank can read the names of 16,384 ranks") {
  constexpr std::size_t ranks = 16384, on_a_host = 8;
  const auto member = [&](std::size_t rank) {
    const std::string host = fmt::format("node-{:04}", rank / on_a_host);
    return Member{rank, ranks, host, 1234567, fmt::format("{:0>36}pid:[4026531836]", host), on_a_host};
  };
  std::string sent;
  Rendezvous rendezvous("job", ranks, [&](std::size_t, const Message& message) { sent = to_wire(message); });
  for (std::size_t rank = ranks; rank-- > 0;) {
    rendezvous.take(rank, {Kind::hello, "job", to_line(member(rank))});
  }
  Inbox inbox;
  inbox.add(sent);
  std::istringstream lines(inbox.next()->value);
  std::vector<Member> read;
  for (std::string line; std::getline(lines, line);) {
    read.push_back(member_from(line, read.empty() ? Member{} : read.back()));
    REQUIRE(to_line(read.back()) == to_line(member(read.size() - 1)));
  }
  CHECK(read.size() == ranks);
}

TEST_CASE("a process of another job is refused, and the others continue") {
  Rig rig;
  rig.hello(1, 0);
  rig.hello(2, 1, 4);
  CHECK_THAT(rig.last(), Contains("world size of 3, but rank 1 one of 4"));
  rig.hello(3, 0);
  CHECK_THAT(rig.last(), Contains("rank 0 (node, pid 100)") && Contains("two jobs the same port"));
  rig.hello(4, 1, 3, "other");
  CHECK_THAT(rig.last(), Contains("\"job\"") && Contains("\"other\""));
  rig.hello(5, 7);
  CHECK_THAT(rig.last(), Contains("rank 7 in a world of 3"));
  rig.rendezvous.ended(2);  // no member's connection, so nothing fails
  CHECK_FALSE(rig.rendezvous.failed());
  rig.rendezvous.fail_without_missing("3 s");
  CHECK_THAT(rig.last(), Contains("rank 1, 2 did not connect within 3 s") && Contains("world size of 3"));
  CHECK(rig.ranks() == std::vector<std::size_t>{1, 2});
}

TEST_CASE("a rank that counts other ranks as a host is refused") {
  Rig rig;
  rig.hello(1, 0);
  rig.rendezvous.take(2, {Kind::hello, "job", to_line({1, 3, "node", 101, "here", 2})});
  CHECK(rig.sent.back().second.kind == Kind::refused);
  CHECK_THAT(rig.last(), Contains("rank 0 has none, and rank 1 has 2: set BALLAST_RANKS_PER_HOST"));
}

TEST_CASE("the ranks of a group get the values of all of them, with one answer each") {
  Rig rig;
  rig.all_come();
  const std::string binary("1:\0 2", 5);
  rig.rendezvous.take(12, {Kind::share, "group", to_line(Share{1, 2, binary})});
  CHECK(rig.sent.empty());
  rig.rendezvous.take(12, {Kind::share, "group", to_line(Share{1, 2, "again"})});
  rig.rendezvous.take(11, {Kind::share, "other", to_line(Share{0, 2, ""})});
  CHECK_THROWS_WITH(rig.rendezvous.take(10, {Kind::share, "group", "no share"}), Contains("malformed"));
  const std::string too_large = to_line(Share{0, 1000, "of a larger group than the job"});
  CHECK_THROWS_WITH(rig.rendezvous.take(10, {Kind::share, "group", too_large}), Contains("malformed"));
  CHECK(rig.sent.empty());
  rig.rendezvous.take(10, {Kind::share, "group", to_line(Share{0, 2, ""})});
  REQUIRE(rig.sent.size() == 2);
  CHECK(rig.sent[0].first == 12);
  CHECK(rig.sent[1].first == 10);
  CHECK(split(rig.last()) == std::vector<std::string>{"", binary});
}

TEST_CASE("a rank that shares alone is answered at once, each time, and a process that is no member is not") {
  Rig rig;
  rig.all_come();
  const std::pair<std::size_t, Message> answer{11, {Kind::shared, "key", join({"value"})}};
  for (std::size_t time = 1; time <= 2; ++time) {
    rig.rendezvous.take(11, {Kind::share, "key", to_line(Share{0, 1, "value"})});
    CHECK(rig.sent.size() == time);
    CHECK(rig.sent.back() == answer);
  }
  rig.rendezvous.take(99, {Kind::share, "key", to_line(Share{0, 1, "value"})});
  CHECK(rig.sent.size() == 2);
}

TEST_CASE("of a rank of another machine that is gone, the network may have failed") {
  Rig rig{.machine = "there"};
  rig.all_come();
  rig.rendezvous.ended(11);
  CHECK(rig.last() ==
        "rank 1 (node, pid 101) is gone: connection lost: its process ended, or the network to it failed");
}

TEST_CASE("all ranks are told the first error, and no later one") {
  Rig rig;
  rig.all_come();
  rig.rendezvous.ended(11);
  CHECK(rig.sent.size() == 2);  // none to the dead rank
  CHECK(rig.last() == "rank 1 (node, pid 101) died: connection lost: its process ended");
  CHECK(rig.ranks() == std::vector<std::size_t>{1});
  rig.rendezvous.take(12, {Kind::failed, "", "a consequence"});
  CHECK(rig.sent.size() == 2);
  CHECK(rig.rendezvous.is_named(11));
  CHECK_FALSE(rig.rendezvous.is_named(12));
}

TEST_CASE("a rank that says goodbye is not reported as dead") {
  Rig rig;
  rig.all_come();
  for (std::size_t connection = 10; connection < 13; ++connection) {
    CHECK_FALSE(rig.rendezvous.all_left());
    rig.rendezvous.take(connection, {Kind::goodbye, "", ""});
    rig.rendezvous.ended(connection);
  }
  CHECK(rig.rendezvous.all_left());
  CHECK_FALSE(rig.rendezvous.failed());
  rig.hello(20, 1);  // a rank of the next job, which rank 0 has not begun yet
  CHECK(rig.sent.back() == std::pair<std::size_t, Message>{20, {Kind::later, "", ""}});
}

TEST_CASE("the other ranks are told why a rank leaves, and fail if it has failed") {
  Rig rig;
  rig.all_come();
  rig.rendezvous.take(11, {Kind::goodbye, "", "it is done"});
  REQUIRE(rig.sent.size() == 2);
  CHECK(rig.sent[0] == std::pair<std::size_t, Message>{10, {Kind::left, "1", "it is done"}});
  CHECK(rig.sent[1] == std::pair<std::size_t, Message>{12, {Kind::left, "1", "it is done"}});
  CHECK_FALSE(rig.rendezvous.failed());
  rig.rendezvous.take(12, {Kind::goodbye, "failed", "ValueError: this batch is bad"});
  CHECK(rig.rendezvous.failed());
  CHECK(rig.sent.back().first == 10);  // the only one that is still there
  CHECK(rig.last() == "rank 2 (node, pid 102) left: ValueError: this batch is bad");
  CHECK(rig.ranks() == std::vector<std::size_t>{2});
}

TEST_CASE("of several late ranks, the one that waits for no other is named") {
  Rig chain;
  chain.all_come();
  chain.late(0, 1);
  chain.late(1, 2);
  chain.rendezvous.fail_with_late_ranks("5 s");
  CHECK(chain.last() == "rank 2 (node, pid 102) did not arrive within 5 s");
  CHECK(chain.ranks() == std::vector<std::size_t>{2});
  Rig circle;
  circle.all_come();
  circle.late(0, 1);
  circle.late(1, 0);
  circle.rendezvous.fail_with_late_ranks("5 s");
  CHECK_THAT(circle.last(),
             Contains("wait for each other") && Contains("rank 0 (node, pid 100), rank 1 (node, pid 101)"));
}

TEST_CASE("the first report of a late rank makes the hub ask all ranks for whom they wait") {
  Rig rig;
  rig.all_come();
  rig.late(0, 1);
  const Message question{Kind::waits, "", ""};
  CHECK(rig.sent == std::vector<std::pair<std::size_t, Message>>{{10, question}, {11, question}, {12, question}});
  rig.waits(1, 2);
  CHECK(rig.sent.size() == 3);
  rig.rendezvous.fail_with_late_ranks("5 s");
  CHECK(rig.last() == "rank 2 (node, pid 102) did not arrive within 5 s");
  CHECK(rig.ranks() == std::vector<std::size_t>{2});
}

TEST_CASE("a rank is not named for a wait that no late rank depends on") {
  Rig rig{.size = 4};
  rig.all_come();
  rig.late(0, 1);
  rig.waits(2, 3);
  rig.rendezvous.fail_with_late_ranks("5 s");
  CHECK(rig.last() == "rank 1 (node, pid 101) did not arrive within 5 s");
}

TEST_CASE("if the ranks behind a late one wait for each other, they are named") {
  Rig rig{.size = 4};
  rig.all_come();
  rig.late(3, 0);
  rig.waits(0, 1);
  rig.waits(1, 2);
  rig.waits(2, 1);
  rig.rendezvous.fail_with_late_ranks("5 s");
  CHECK(
      rig.last() ==
      "ranks wait for each other, because they make different calls: rank 1 (node, pid 101), rank 2 (node, pid 102); none "
      "arrived within 5 s");
  CHECK(rig.ranks() == std::vector<std::size_t>{1, 2});
}

TEST_CASE("a rank that has left or died is named, and not those that are late because of it") {
  Rig left{.size = 4};
  left.all_come();
  left.rendezvous.take(12, {Kind::goodbye, "", "it is done"});
  left.late(0, 1);
  left.late(0, 3);
  left.waits(1, 2);
  left.rendezvous.fail_with_late_ranks("5 s");
  CHECK(left.last() == "rank 2 (node, pid 102) left: it is done");
  CHECK(left.ranks() == std::vector<std::size_t>{2});
  Rig died;
  died.all_come();
  died.late(0, 1);
  died.rendezvous.ended(12);
  died.rendezvous.fail_with_late_ranks("5 s");
  CHECK(died.last() == "rank 2 (node, pid 102) died: connection lost: its process ended");
}

TEST_CASE("of a group that shares values, the ranks are late that have not shared theirs") {
  Rig rig;
  rig.all_come();
  rig.rendezvous.take(12, {Kind::share, "group", to_line(Share{0, 2, "value"})});
  rig.rendezvous.take(12, {Kind::late, "group", "2 1"});
  rig.rendezvous.fail_with_late_ranks("5 s");
  CHECK(rig.last() == "rank 1 (node, pid 101) did not arrive within 5 s");
}

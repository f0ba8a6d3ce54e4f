// Tests that every communicator passes when a rank fails.
#include <ballast/error.h>

#include <netinet/in.h>
#include <sys/socket.h>

#include <catch2/catch.hpp>
#include <functional>
#include <stdexcept>
#include <thread>

#include "tests/comm/rank_values.h"
#include "tests/comm/test_groups.h"
#include "zero/comm/call.h"
#include "zero/comm/message.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;
using Catch::StartsWith;

namespace {

// Calls every collective, until one throws.
void call_for_ever(Communicator& ranks) {
  const Values mine = Values::of_rank(ranks.rank(), DType::bf16, 30000);
  Values all(DType::bf16, 30000 * ranks.size());
  Values part(DType::fp32, 30000);
  while (true) {
    ranks.all_gather(mine.view(), all.view());
    ranks.reduce_scatter(all.view(), part.view());
    ranks.barrier();
  }
}

// Shuts Gloo's connection: the one to the hub is older.
void shut_newest_connection() {
  for (int descriptor = 1023; descriptor >= 0; --descriptor) {
    sockaddr_in peer{};
    socklen_t bytes = sizeof(peer);
    const bool is_connected = ::getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0;
    if (is_connected && peer.sin_family == AF_INET) {
      REQUIRE(::shutdown(descriptor, SHUT_RDWR) == 0);
      return;
    }
  }
}

}  // namespace

TEST_CASE("after an abort, waiting ranks and all later calls fail with its reason") {
  for (const GroupKind& kind : group_kinds()) {
    INFO(kind.name);
    const Failures failures = kind.run(3, patient, [](Communicator& ranks) {
      ranks.barrier();
      if (ranks.rank() == 1) ranks.abort("the loss is not a number");
      try {
        call_for_ever(ranks);
      } catch (const Error&) {
      }
      ranks.barrier();
    });
    for (const std::string& failure : failures) {
      CHECK_THAT(failure, Contains("B3301") && Contains("rank 1") && Contains("the loss is not a number"));
    }
  }
}

// They cannot because the build has no NCCL, or the machine no GPU, or only one for both ranks.
TEST_CASE("if processes cannot exchange GPU memory, every process fails with the reason") {
  for (const GroupKind& kind : group_kinds()) {
    if (kind.name == "threads") continue;  // a GPU's stream can make their copies
    INFO(kind.name);
    const Channel channel;
    for (const std::string& failure : kind.run(2, patient, [&](Communicator& ranks) { ranks.split(0, &channel); })) {
      CHECK_THAT(failure, Contains("no NCCL") || Contains("B210") || Contains("NCCL failed"));
    }
  }
}

TEST_CASE("calls of all_reduce with equal sizes but different purposes do not match") {
  for (const GroupKind& kind : group_kinds()) {
    INFO(kind.name);
    const Failures failures = kind.run(2, patient, [](Communicator& ranks) {
      std::int64_t values[] = {1, 2, 3};
      ranks.all_reduce(values, ranks.rank() == 0 ? Purpose::agreement : Purpose::off_plan);
    });
    for (const std::string& failure : failures) {
      CHECK_THAT(failure, Contains("all_reduce of integers for the decision of a step, 3 of them") &&
                              Contains("all_reduce of integers for an off-plan use, 3 of them"));
    }
  }
}

TEST_CASE("the ranks of the first error are those that have left, whatever ranks its words name") {
  for (const GroupKind& kind : group_kinds()) {
    INFO(kind.name);
    const Failures failures = kind.run(3, patient, [](Communicator& ranks) {
      if (ranks.rank() == 1) return ranks.leave({.words = "rank 0 died", .has_failed = true});
      try {
        call_for_ever(ranks);
      } catch (const Error& error) {
        throw std::runtime_error(error.problem().what + "; failed: " + to_words(ranks.failed_ranks()));
      }
    });
    for (const std::size_t rank : {0u, 2u}) {
      CHECK_THAT(failures[rank], Contains("left: rank 0 died; failed: 1"));
    }
    CHECK(failures[1].empty());
  }
}

// The hub still has connections to both ranks, and does not know why they fail.
TEST_CASE("a broken connection between ranks names the rank at its other end") {
  for (const GroupKind& kind : group_kinds()) {
    if (kind.name != "gloo") continue;
    const Failures failures = kind.run(2, patient, [](Communicator& ranks) {
      ranks.barrier();
      if (ranks.rank() == 1) shut_newest_connection();
      try {
        call_for_ever(ranks);
      } catch (const Error& error) {
        throw std::runtime_error(error.problem().what + "; failed: " + to_words(ranks.failed_ranks()));
      }
    });
    CHECK_THAT(failures[0],
               Contains("lost the connection to rank ") && (Contains("failed: 0") || Contains("failed: 1")));
    CHECK_THAT(failures[1],
               Contains("lost the connection to rank ") && (Contains("failed: 0") || Contains("failed: 1")));
  }
}

TEST_CASE("an abort reaches groups that were split off") {
  for (const GroupKind& kind : group_kinds()) {
    INFO(kind.name);
    const Failures failures = kind.run(3, patient, [](Communicator& ranks) {
      const auto other = ranks.split(0);
      if (ranks.rank() == 2) {
        ranks.abort("enough");
      } else {
        call_for_ever(*other);
      }
    });
    CHECK_THAT(failures[0], Contains("B3301") && Contains("rank 2") && Contains("enough"));
    CHECK_THAT(failures[1], Contains("B3301") && Contains("rank 2") && Contains("enough"));
    CHECK(failures[2].empty());
  }
}

TEST_CASE("errors of a group that was split off name ranks of the job") {
  for (const GroupKind& kind : group_kinds()) {
    INFO(kind.name);
    using Body = std::function<void(Communicator & pair, bool is_last)>;
    const auto run = [&](const Body& body, std::chrono::milliseconds timeout = patient,
                         std::chrono::milliseconds others_stay = {}) {
      return kind.run(4, timeout, [&](Communicator& ranks) {
        const auto pair = ranks.split(ranks.rank() / 2);
        if (ranks.rank() >= 2) return body(*pair, ranks.rank() == 3);
        std::this_thread::sleep_for(others_stay);  // rank 0 says who is late
      });
    };
    const Failures aborted = run([](Communicator& pair, bool is_last) {
      if (is_last) pair.abort("enough");
      pair.barrier();
    });
    CHECK_THAT(aborted[2], Contains("rank 3") && Contains("enough"));
    constexpr auto timeout = std::chrono::milliseconds(4000);  // connecting has this limit too
    constexpr auto long_time = 2 * timeout;
    const auto come_late = [&](Communicator& pair, bool is_last) {
      if (is_last) std::this_thread::sleep_for(long_time);
      pair.barrier();
    };
    const Failures late = run(come_late, timeout, long_time);
    CHECK_THAT(late[2], Contains("rank 3") && Contains("did not arrive"));
    const Failures different = run([](Communicator& pair, bool is_last) {
      std::int64_t values[] = {1, 2};
      pair.all_reduce(std::span(values, is_last ? 2 : 1));
    });
    CHECK_THAT(different[2] + different[3],
               Contains("makes another call") && (Contains("rank 2") || Contains("rank 3")) && !Contains("rank 1 "));
    for (const std::size_t of_last : {2u, 1u}) {  // bytes of its second part; its first one has 2 bytes instead of 1
      const Failures other_parts = run([&](Communicator& pair, bool is_last) {
        std::byte bytes[4]{}, space[3]{};
        const std::size_t peer = is_last ? 0 : 1;
        const auto sent_part = [&](std::size_t count) { return SentPart{peer, ConstView(bytes, count, DType::u8)}; };
        const SentPart sent[] = {sent_part(is_last ? 2 : 1), sent_part(is_last ? of_last : 2)};
        const ReceivedPart received[] = {{peer, View(space, 1, DType::u8)}, {peer, View(space + 1, 2, DType::u8)}};
        pair.exchange(sent, received);
      });
      CHECK_THAT(other_parts[2], Contains("rank 3 sends parts of other sizes"));
    }
  }
}

TEST_CASE("when ranks make different calls, the error names both calls") {
  for (const GroupKind& kind : group_kinds()) {
    INFO(kind.name);
    const Failures failures = kind.run(2, patient, [](Communicator& ranks) {
      Values part(DType::fp32, ranks.rank() == 0 ? 10 : 11);
      Values all(DType::fp32, 2 * part.view().count());
      ranks.all_gather(part.view(), all.view());
    });
    const std::string both = failures[0] + failures[1];
    CHECK_THAT(both, Contains("B1003") && Contains("all_gather of 10 fp32") && Contains("all_gather of 11 fp32"));
    CHECK_FALSE(failures[0].empty());
    CHECK_FALSE(failures[1].empty());
  }
}

TEST_CASE("mismatched sizes and formats are refused, and the other ranks stop waiting") {
  const Values five = Values::of_rank(0, DType::bf16, 5);
  struct Refused {
    std::string code, needed;
    std::function<void(Communicator& ranks, View three)> call;
  };
  const Refused all_refused[] = {
      {"B1003", "9 elements", [&](Communicator& ranks, View three) { ranks.reduce_scatter(five.view(), three); }},
      {"B1002", "bf16", [&](Communicator& ranks, View three) { ranks.all_gather(five.view().part(0, 1), three); }},
      {"B1001", "memory of its own", [](Communicator& ranks, View three) { ranks.all_reduce(three, three); }},
      {"B1001", "memory of its own",
       [](Communicator& ranks, View three) { ranks.reduce_scatter(three, three.part(2, 1)); }},
      {"B1003", "the rank itself", [](Communicator& ranks, View three) {
         const SentPart sent{.rank = ranks.rank(), .values = three.part(0, 1)};
         const ReceivedPart received{.rank = ranks.rank(), .values = three.part(1, 2)};
         ranks.exchange({&sent, 1}, {&received, 1});
       }}};
  for (const GroupKind& kind : group_kinds()) {
    for (const Refused& refused : all_refused) {
      INFO(kind.name << ", " << refused.code);
      const Failures failures = kind.run(3, patient, [&](Communicator& ranks) {
        Values three(DType::fp32, 3);
        if (ranks.rank() == 1) refused.call(ranks, three.view());
        ranks.barrier();
      });
      CHECK_THAT(failures[1], StartsWith(refused.code) && Contains(refused.needed));
      CHECK_THAT(failures[0], StartsWith("B3301") && Contains("rank 1") && Contains(refused.code));
      CHECK_THAT(failures[2], StartsWith("B3301") && Contains("rank 1") && Contains(refused.code));
    }
  }
}

TEST_CASE("a rank that does not arrive is named after the timeout") {
  for (const GroupKind& kind : group_kinds()) {
    INFO(kind.name);
    // The timeout is also that of connecting, which takes a part of a second on a machine with other work.
    const Failures failures = kind.run(3, std::chrono::milliseconds(1200), [](Communicator& ranks) {
      if (ranks.rank() != 1) ranks.barrier();
      if (ranks.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3000));
    });
    for (const std::size_t rank : {0u, 2u}) {
      CHECK_THAT(failures[rank], Contains("B330") && Contains("rank 1") && Contains("did not arrive within 1.2 s"));
    }
    CHECK_THAT(failures[0] + failures[2], Contains("B3302"));
  }
}

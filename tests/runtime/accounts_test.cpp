#include <ballast/error.h>
#include <ballast/memory.h>

#include <catch2/catch.hpp>
#include <thread>

using namespace ballast;

TEST_CASE("bytes are booked for as long as the reservation lives") {
  MemoryAccounts accounts;
  {
    const Reservation moments = accounts.reserve(MemoryKind::pinned, 100, "moments of h.7");
    const Reservation more = accounts.reserve(MemoryKind::pinned, 50, "moments of h.7");
    const Reservation staging = accounts.reserve(MemoryKind::pinned, 7, "staging");
    CHECK(moments.bytes() == 100);
    CHECK(accounts.usage(MemoryKind::pinned, "moments of h.7").now == 150);
    CHECK(accounts.total(MemoryKind::pinned).now == 157);
    CHECK(accounts.total(MemoryKind::device).now == 0);
  }
  CHECK(accounts.total(MemoryKind::pinned).now == 0);
  CHECK(accounts.total(MemoryKind::pinned).peak == 157);
  CHECK(accounts.usage(MemoryKind::pinned, "moments of h.7").peak == 150);
  CHECK(accounts.usage(MemoryKind::pageable, "moments of h.7").peak == 0);
}

TEST_CASE("a moved reservation is booked once") {
  MemoryAccounts accounts;
  Reservation first = accounts.reserve(MemoryKind::device, 10, "a");
  Reservation second = std::move(first);
  CHECK(first.bytes() == 0);
  CHECK(accounts.total(MemoryKind::device).now == 10);
  second = accounts.reserve(MemoryKind::device, 3, "b");
  CHECK(accounts.total(MemoryKind::device).now == 3);
  second = Reservation();
  CHECK(accounts.total(MemoryKind::device).now == 0);
}

TEST_CASE("past the budget an error names needed, available and the largest owners") {
  MemoryAccounts accounts;
  accounts.limit(MemoryKind::pageable, 10 << 20);
  const Reservation large = accounts.reserve(MemoryKind::pageable, 6 << 20, "moments");
  const Reservation small = accounts.reserve(MemoryKind::pageable, 1 << 20, "staging");
  CHECK_THROWS_AS(accounts.reserve(MemoryKind::pageable, (3 << 20) + 1, "master"), ResourceError);
  CHECK_THROWS_AS(accounts.reserve(MemoryKind::pageable, SIZE_MAX, "master"), ResourceError);
  CHECK_THROWS_WITH(accounts.reserve(MemoryKind::pageable, 4 << 20, "master"),
                    Catch::Contains("B2004") && Catch::Contains("master") && Catch::Contains("4 MiB") &&
                        Catch::Contains("3 MiB of 10 MiB; moments holds 6 MiB; staging holds 1 MiB"));
  CHECK(accounts.total(MemoryKind::pageable).peak == 7 << 20);
  CHECK_NOTHROW(accounts.reserve(MemoryKind::pageable, 3 << 20, "master"));
  CHECK_NOTHROW(accounts.reserve(MemoryKind::device, 1 << 30, "another kind has a budget of its own"));
}

TEST_CASE("a budget below the booked bytes refuses every new reservation") {
  MemoryAccounts accounts;
  const Reservation held = accounts.reserve(MemoryKind::device, 100, "a");
  accounts.limit(MemoryKind::device, 50);
  CHECK_THROWS_AS(accounts.reserve(MemoryKind::device, 1, "b"), ResourceError);
}

TEST_CASE("the accounts print as a table") {
  MemoryAccounts accounts;
  const Reservation staging = accounts.reserve(MemoryKind::pinned, 1 << 20, "staging");
  const Reservation moments = accounts.reserve(MemoryKind::pinned, 3 << 20, "moments of h.7");
  { const Reservation slots = accounts.reserve(MemoryKind::device, 1536, "slots"); }
  CHECK(accounts.table() ==
        "memory    owner                                   now       peak\n"
        "device    slots                                   0 B    1.5 KiB\n"
        "pinned    moments of h.7                        3 MiB      3 MiB\n"
        "pinned    staging                               1 MiB      1 MiB\n"
        "device    (all)                                   0 B    1.5 KiB\n"
        "pinned    (all)                                 4 MiB      4 MiB\n");
}

TEST_CASE("threads book at once without losing a byte or passing the budget") {
  MemoryAccounts accounts;
  accounts.limit(MemoryKind::pageable, 1000);
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 8; ++thread) {
      threads.emplace_back([&accounts, thread] {
        for (std::size_t round = 0; round < 2000; ++round) {
          try {
            const Reservation own = accounts.reserve(MemoryKind::pageable, round % 200, std::to_string(thread));
            const Reservation shared = accounts.reserve(MemoryKind::pageable, 150, "shared");
          } catch (const ResourceError&) {
          }
        }
      });
    }
  }
  CHECK(accounts.total(MemoryKind::pageable).now == 0);
  CHECK(accounts.total(MemoryKind::pageable).peak <= 1000);
  for (const MemoryAccounts::Entry& entry : accounts.entries()) {
    CHECK(entry.usage.now == 0);
  }
}

TEST_CASE("a booking that is cancelled leaves no trace, not even in the peak") {
  MemoryAccounts accounts;
  const Reservation kept = accounts.reserve(MemoryKind::pageable, 100, "kept");
  accounts.reserve(MemoryKind::pageable, 1000, "not to be had").cancel();
  CHECK(accounts.total(MemoryKind::pageable).now == 100);
  CHECK(accounts.total(MemoryKind::pageable).peak == 100);
  CHECK(accounts.usage(MemoryKind::pageable, "not to be had").peak == 0);
}

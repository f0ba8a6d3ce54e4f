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

TEST_CASE("threads book at once without losing a byte") {
  MemoryAccounts accounts;
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 8; ++thread) {
      threads.emplace_back([&accounts, thread] {
        for (std::size_t round = 0; round < 2000; ++round) {
          const Reservation own = accounts.reserve(MemoryKind::pageable, round % 200, std::to_string(thread));
          const Reservation shared = accounts.reserve(MemoryKind::pageable, 150, "shared");
        }
      });
    }
  }
  CHECK(accounts.total(MemoryKind::pageable).now == 0);
  CHECK(accounts.total(MemoryKind::pageable).peak <= 8 * (199 + 150));
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

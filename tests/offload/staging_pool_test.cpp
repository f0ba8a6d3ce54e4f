#include "offload/staging_pool.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <set>
#include <thread>

#include "kernels/runtime/error.h"
#include "tests/offload/test_queues.h"

using namespace ballast;
using namespace ballast::offload;

TEST_CASE("slots are apart, fit for direct I/O, and booked under the pool's name in exactly their size") {
  MemoryAccounts accounts;
  StagingPool pool(accounts, "staging", {.slots = 3, .slot_bytes = 5000});
  CHECK(pool.slot_bytes() == 2 * block_bytes);
  CHECK(accounts.total(MemoryKind::pinned).now == 3 * 2 * block_bytes);
  std::set<std::byte*> begins;
  std::vector<Staging> slots;
  for (int i = 0; i < 3; ++i) {
    slots.push_back(pool.take("read"));
    CHECK(reinterpret_cast<std::uintptr_t>(slots.back().bytes().data()) % block_bytes == 0);
    CHECK(slots.back().bytes().size() == 2 * block_bytes);
    begins.insert(slots.back().bytes().data());
  }
  CHECK(begins.size() == 3);
}

TEST_CASE("an empty pool makes its users wait, and never grows") {
  MemoryAccounts accounts;
  StagingPool pool(accounts, "staging", {.slots = 2, .slot_bytes = 4096});
  std::optional<Staging> first(pool.take("read"));
  const Staging second = pool.take("write");
  CHECK(pool.free_slots() == 0);
  CHECK_FALSE(pool.try_take("read").has_value());
  CHECK(pool.usage() == std::map<std::string, std::size_t>{{"read", 1}, {"write", 1}});
  std::atomic<bool> waits = true;
  std::thread waiting([&] {
    const Staging third = pool.take("update");
    waits = false;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(waits);
  first.reset();
  waiting.join();
  CHECK_FALSE(waits);
  CHECK(pool.usage() == std::map<std::string, std::size_t>{{"write", 1}});
}

TEST_CASE("many threads share a few slots, and none is with two at once") {
  MemoryAccounts accounts;
  StagingPool pool(accounts, "staging", {.slots = 3, .slot_bytes = 4096});
  std::atomic<int> collisions = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 200; ++round) {
        const Staging slot = pool.take("thread " + std::to_string(thread));
        slot.bytes()[0] = static_cast<std::byte>(thread);
        std::this_thread::yield();
        if (slot.bytes()[0] != static_cast<std::byte>(thread)) ++collisions;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(collisions == 0);
  CHECK(pool.free_slots() == 3);
  CHECK(pool.usage().empty());
}

TEST_CASE("queues know the pool's memory while it lives") {
  for (const QueueKind& kind : queue_kinds()) {
    const auto queue = kind.make({});
    MemoryAccounts accounts;
    for (int time = 0; time < 300; ++time) {  // more often than a queue could remember for ever
      const StagingPool pool(accounts, "staging", {.slots = 1, .slot_bytes = 4096}, {queue.get()});
    }
  }
}

TEST_CASE("a pool of nothing is refused") {
  MemoryAccounts accounts;
  CHECK_THROWS_WITH(StagingPool(accounts, "staging", {.slots = 0, .slot_bytes = 1}), Catch::Contains("B1001"));
}

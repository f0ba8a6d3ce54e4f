#include <atomic>
#include <catch2/catch.hpp>
#include <thread>

#include "zero/comm/thread_communicator.h"

using namespace ballast;

TEST_CASE("published memory stays valid while another rank reads it, even after an abort") {
  ThreadGroup group(2);
  std::atomic<bool> looking = true;
  bool given_back_too_early = true;
  std::thread shows([&] {
    const std::vector<std::byte> memory(1 << 20);
    group.publish(0, {.data = memory.data(), .bytes = memory.size()});
    group.withdraw(0);
    given_back_too_early = looking;
  });
  group.publish(1, {});
  group.abort("enough");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  looking = false;
  group.withdraw(1);
  shows.join();
  CHECK_FALSE(given_back_too_early);
  CHECK_THROWS_WITH(group.publish(1, {}), Catch::Contains("B3301") && Catch::Contains("enough"));
}

TEST_CASE("a rank that arrives too late is not matched with one that has timed out") {
  ThreadGroup group(2, std::chrono::milliseconds(10));
  CHECK_THROWS_WITH(group.publish(0, {}), Catch::Contains("B3302") && Catch::Contains("rank 1 did not arrive"));
  CHECK_THROWS_WITH(group.publish(1, {}), Catch::Contains("B3301"));
}

TEST_CASE("a group refuses a rank beyond its size") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  ThreadGroup group(2);
  CHECK_THROWS_WITH(thread_communicator(group, 2, *backend), Catch::Contains("a rank below 2"));
}

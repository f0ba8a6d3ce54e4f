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
    group.publish(0, {.values = byte_view(std::span(memory))});
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

TEST_CASE("a timeout names the thread at the end of a chain of waits in different groups") {
  ThreadGroup all(3, std::chrono::seconds(3));
  const std::size_t first_two[] = {0, 1};
  const std::size_t last_two[] = {1, 2};
  const auto first = all.part(first_two);
  const auto last = all.part(last_two);
  std::string failure_of_1;
  std::thread waits_for_2([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // rank 0 then reports first
    try {
      last->publish(0, {});
    } catch (const std::exception& late) {
      failure_of_1 = late.what();
    }
  });
  CHECK_THROWS_WITH(first->publish(0, {}), Catch::Contains("B3302") && Catch::Contains("rank 2 did not arrive"));
  waits_for_2.join();
  CHECK_THAT(failure_of_1, Catch::Contains("B3301") && Catch::Contains("rank 2 did not arrive"));
}

TEST_CASE("threads that wait for each other in different groups name another rank than their own") {
  ThreadGroup all(2, std::chrono::milliseconds(500));
  const std::size_t both[] = {0, 1};
  const auto one = all.part(both);
  const auto other = all.part(both);
  bool has_failed = false;
  std::thread rank_1([&] {
    try {
      other->publish(1, {});
    } catch (const Error&) {
      has_failed = true;
    }
  });
  CHECK_THROWS_WITH(one->publish(0, {}), Catch::Contains("rank 0 did not") || Catch::Contains("rank 1 did not"));
  rank_1.join();
  CHECK(has_failed);
}

TEST_CASE("a group refuses a rank beyond its size") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  ThreadGroup group(2);
  CHECK_THROWS_WITH(thread_communicator(group, 2, *backend), Catch::Contains("a rank below 2"));
}

TEST_CASE("ranks that are threads run together, and the first error of one ends all of them") {
  std::string lines;
  Log log([&](Level level, std::string_view line) { lines += std::string(name(level)) + ": " + std::string(line); });
  std::atomic<std::int64_t> sum = 0;
  std::atomic<int> right_means = 0;
  const auto add = [&](Communicator& world) {
    std::int64_t one = 1;
    world.all_reduce({&one, 1});
    sum += one;
    if (world.mean(static_cast<double>(world.rank())) == 1.0) ++right_means;
  };
  CHECK(run_ranks(3, add, {.log = &log}) == 0);
  CHECK(sum == 9);
  CHECK(right_means == 3);
  CHECK(lines == "");

  const auto fail_on_one = [&](Communicator& world) {
    if (world.rank() == 1) throw std::runtime_error("there is no text");
    world.barrier();
  };
  CHECK(run_ranks(3, fail_on_one, {.log = &log}) == 1);
  CHECK(lines == "error: rank 1: there is no text");

  const auto throw_number = [](Communicator& world) {
    if (world.rank() == 1) throw 42;
    world.barrier();
  };
  lines.clear();
  CHECK(run_ranks(3, throw_number, {.log = &log}) == 1);
  CHECK(lines == "error: rank 1: an exception that is no std::exception");
  CHECK(run_ranks(0, add, {.log = &log}) == 1);
  CHECK_THAT(lines, Catch::Contains("cannot connect 0 threads"));
}

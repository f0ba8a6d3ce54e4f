// Threads that do something in one order.
#include "zero/engine/sequencer.h"

#include <catch2/catch.hpp>
#include <thread>
#include <vector>

using namespace ballast;

TEST_CASE("turns are taken in the order in which they were drawn") {
  Turns turns;
  std::vector<std::size_t> taken;
  constexpr std::size_t threads = 3, rounds = 200;
  std::vector<std::vector<std::size_t>> drawn(threads);
  for (std::size_t i = 0; i < threads * rounds; ++i) {
    drawn[i % threads].push_back(turns.draw());
  }
  {
    std::vector<std::jthread> takers;
    for (const std::vector<std::size_t>& mine : drawn) {
      takers.emplace_back([&] {
        for (const std::size_t turn : mine) {
          turns.await(turn);
          taken.push_back(turn);
          turns.end();
        }
      });
    }
  }
  std::vector<std::size_t> expected(threads * rounds);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    expected[i] = i;
  }
  CHECK(taken == expected);
}

TEST_CASE("nobody waits for a turn that will not come") {
  Turns turns;
  turns.draw();
  const std::size_t second = turns.draw();
  std::jthread waits([&] { turns.await(second); });
  turns.give_up();
}

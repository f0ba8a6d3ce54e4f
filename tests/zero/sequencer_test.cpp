// Tests of threads that act in one order.
#include "zero/engine/sequencer.h"

#include <catch2/catch.hpp>
#include <thread>
#include <vector>

using namespace ballast;

TEST_CASE("threads run in the order of their tickets") {
  Sequencer sequencer;
  std::vector<std::size_t> taken;
  constexpr std::size_t threads = 3, rounds = 200;
  std::vector<std::vector<std::size_t>> drawn(threads);
  for (std::size_t i = 0; i < threads * rounds; ++i) {
    drawn[i % threads].push_back(sequencer.next_ticket());
  }
  {
    std::vector<std::jthread> takers;
    for (const std::vector<std::size_t>& mine : drawn) {
      takers.emplace_back([&] {
        for (const std::size_t ticket : mine) {
          sequencer.await(ticket);
          taken.push_back(ticket);
          sequencer.done();
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

TEST_CASE("cancelling ends the wait for a ticket whose turn never comes") {
  Sequencer sequencer;
  sequencer.next_ticket();
  const std::size_t second = sequencer.next_ticket();
  std::jthread waits([&] { sequencer.await(second); });
  sequencer.cancel();
}

// Tests of threads that act in one order.
#include "zero/engine/exchange_order.h"

#include <catch2/catch.hpp>
#include <thread>
#include <vector>

using namespace ballast;

TEST_CASE("threads act in the order in which their turns were added, also while they wait") {
  Sequencer sequencer;
  const Sequencer::Party one, other;
  constexpr std::size_t threads = 3, rounds = 200;
  std::vector<char> turns(threads * rounds);
  std::vector<Sequencer::Turn> taken;
  {
    std::vector<std::jthread> takers;
    for (std::size_t thread = 0; thread < threads; ++thread) {
      takers.emplace_back([&, thread] {
        for (std::size_t i = thread; i < turns.size(); i += threads) {
          CHECK(sequencer.await(thread == 0 ? one : other, &turns[i]));
          taken.push_back(&turns[i]);
          sequencer.done();
        }
      });
    }
    for (std::size_t i = 0; i < turns.size(); ++i)
      sequencer.add(i % threads == 0 ? one : other, &turns[i]);
  }
  std::vector<Sequencer::Turn> expected;
  for (const char& turn : turns)
    expected.push_back(&turn);
  CHECK(taken == expected);
}

TEST_CASE("a party that cancels its turns waits for none, and holds up no other party") {
  Sequencer sequencer;
  Sequencer::Party failed, other;
  const char turns[3] = {};
  sequencer.add(failed, &turns[0]);
  sequencer.add(failed, &turns[1]);
  sequencer.add(other, &turns[2]);
  CHECK(sequencer.await(failed, &turns[0]));
  bool is_in_turn = true;
  std::jthread waits([&] { is_in_turn = sequencer.await(failed, &turns[1]); });
  sequencer.cancel(failed);
  waits.join();
  CHECK_FALSE(is_in_turn);
  std::jthread follows([&] { CHECK(sequencer.await(other, &turns[2])); });
  sequencer.done();  // the turn that had begun ends
  follows.join();
  sequencer.add(failed, &turns[1]);  // the sequencer ignores it
  sequencer.done();
  sequencer.add(other, &turns[0]);
  CHECK(sequencer.await(other, &turns[0]));
}

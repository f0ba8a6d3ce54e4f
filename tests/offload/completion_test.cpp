#include <ballast/error.h>

#include "offload/completion.h"

#include <catch2/catch.hpp>
#include <optional>
#include <thread>

using namespace ballast;
using namespace ballast::offload;

TEST_CASE("an operation that was never started is done") {
  const Completion nothing;
  CHECK(nothing.is_done());
  CHECK(nothing.wait_for(std::chrono::seconds(0)));
  CHECK_NOTHROW(nothing.wait());
}

TEST_CASE("a promise that another thread finishes wakes every wait") {
  Promise promise;
  const Completion first = promise.completion();
  const Completion second = first;
  CHECK_FALSE(first.is_done());
  CHECK_FALSE(first.wait_for(std::chrono::milliseconds(1)));
  std::thread other([&] { promise.finish(); });
  first.wait();
  second.wait();
  CHECK(second.wait_for(std::chrono::seconds(0)));
  CHECK(first.is_done());
  other.join();
}

TEST_CASE("every wait throws the operation's error") {
  Promise promise;
  const Completion completion = promise.completion();
  promise.fail(std::make_exception_ptr(std::runtime_error("the drive is gone")));
  CHECK(completion.is_done());
  for (int time = 0; time < 2; ++time) {
    CHECK_THROWS_WITH(completion.wait(), "the drive is gone");
    CHECK_THROWS_WITH(completion.wait_for(std::chrono::seconds(0)), "the drive is gone");
  }
}

TEST_CASE("a dropped promise fails, and a moved-from one does not") {
  std::optional<Promise> promise(std::in_place);
  const Completion completion = promise->completion();
  std::optional<Promise> taken(std::move(*promise));
  promise.reset();
  CHECK_FALSE(completion.is_done());
  taken.reset();
  CHECK_THROWS_WITH(completion.wait(), Catch::Contains("B1999") && Catch::Contains("its promise was dropped"));
}

TEST_CASE("a promise cannot be finished twice") {
  Promise promise;
  promise.finish();
  CHECK_THROWS_WITH(promise.finish(), Catch::Contains("twice"));
  CHECK_NOTHROW(promise.completion().wait());
}

TEST_CASE("waiting for several operations waits for all, then throws the first error") {
  Promise one;
  Promise two;
  Promise three;
  InFlight all;
  all.add(one.completion());
  all.add(two.completion());
  all.add(three.completion());
  two.fail(std::make_exception_ptr(std::runtime_error("second")));
  three.fail(std::make_exception_ptr(std::runtime_error("third")));
  bool last_ended = false;
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    last_ended = true;
    one.finish();
  });
  CHECK_THROWS_WITH(all.wait(), "second");
  CHECK(last_ended);
  CHECK_NOTHROW(all.wait());
  other.join();
}

TEST_CASE("a completion waits for a GPU's event, and orders a stream after it", "[gpu]") {
  const Stream stream;
  const Stream other;
  const auto event = std::make_shared<Event>();
  event->record(stream);
  const Completion completion(event);
  completion.order(other);
  completion.wait();
  CHECK(completion.is_done());
  CHECK(completion.wait_for(std::chrono::seconds(1)));
  Promise promise;
  promise.finish();
  CHECK_NOTHROW(promise.completion().order(other));
}

#include "offload/completion.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <thread>

using namespace ballast;
using namespace ballast::offload;

TEST_CASE("a wait for a hanging drive logs what it waits for until the drive answers") {
  std::vector<std::string> lines;
  std::atomic<int> logged = 0;
  Log log([&](Level, std::string_view line) {
    lines.emplace_back(line);
    ++logged;
  });
  Promise promise;
  std::thread drive([&] {
    while (logged < 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    promise.finish();
  });
  wait_watched(
      promise.completion(), &log, [] { return "the read of tile 3"; }, std::chrono::milliseconds(20));
  drive.join();
  REQUIRE(lines.size() >= 2);
  CHECK(lines[0] == "the read of tile 3 has not ended for 0.02 s: the drive or its file system hangs");
  CHECK(lines[1] == "the read of tile 3 has not ended for 0.04 s: the drive or its file system hangs");
}

TEST_CASE("a wait that ends in time logs nothing, and passes errors on") {
  std::vector<std::string> lines;
  Log log([&](Level, std::string_view line) { lines.emplace_back(line); });
  wait_watched({}, &log, [] { return "it"; });
  Promise promise;
  promise.fail(std::make_exception_ptr(std::runtime_error("broken")));
  CHECK_THROWS_WITH(wait_watched(promise.completion(), &log, [] { return "it"; }), "broken");
  CHECK_THROWS_WITH(wait_watched(promise.completion(), nullptr, [] { return "it"; }), "broken");
  CHECK(lines.empty());
}

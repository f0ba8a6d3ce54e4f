#include <ballast/log.h>

#include <catch2/catch.hpp>
#include <thread>
#include <vector>

using namespace ballast;

namespace {

struct Lines {
  std::vector<std::string> lines;
  Log::Sink sink() {
    return [this](Level level, std::string_view line) {
      lines.push_back(std::string(name(level)) + " " + std::string(line));
    };
  }
};

}  // namespace

TEST_CASE("a log writes the lines of its level and above") {
  Lines seen;
  Log log(seen.sink(), Level::warning);
  log.debug("a");
  log.info("b");
  log.warning("c");
  log.error("d");
  CHECK(seen.lines == std::vector<std::string>{"warning c", "error d"});
}

TEST_CASE("a line about a subject is written once in each log") {
  Lines seen;
  Log first(seen.sink());
  Log second(seen.sink());
  first.write_once(Level::debug, "io_uring", "below the level: not said, and not counted");
  first.write_once(Level::info, "io_uring", "one");
  first.write_once(Level::info, "io_uring", "two");
  first.write_once(Level::info, "memlock", "three");
  second.write_once(Level::info, "io_uring", "four");
  CHECK(seen.lines == std::vector<std::string>{"info one", "info three", "info four"});
}

TEST_CASE("threads may share a log") {
  Lines seen;
  Log log(seen.sink());
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&log] {
        for (int line = 0; line < 1000; ++line) {
          log.info("x");
          log.write_once(Level::info, "y", "y");
        }
      });
    }
  }
  CHECK(seen.lines.size() == 4001);
}

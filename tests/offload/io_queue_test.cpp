// Tests that hold for every kind of queue.
#include <ballast/error.h>

#include "offload/io_queue.h"

#include <sys/stat.h>
#include <unistd.h>
#include <catch2/catch.hpp>

#include <cerrno>
#include <thread>

#include "tests/offload/aligned.h"
#include "tests/offload/descriptors.h"
#include "tests/offload/faulty_calls.h"
#include "tests/offload/test_queues.h"
#include "tests/temporary_directory.h"

using namespace ballast;
using namespace ballast::offload;

namespace {

constexpr std::size_t piece = 8 * block_bytes;

}  // namespace

TEST_CASE("every queue moves all bytes of many concurrent requests") {
  for (const QueueKind& kind : queue_kinds()) {
    for (const bool direct : {true, false}) {
      for (const bool remembered : {true, false}) {
        INFO(kind.name << ", direct " << direct << ", remembered " << remembered);
        const TemporaryDirectory directory;
        const File file(directory.path() / "file", {.create = true, .direct = direct});
        constexpr std::size_t pieces = 40;
        const Aligned written(pieces * piece);
        const Aligned read(pieces * piece);
        const auto queue = kind.make({.depth = 5});
        if (remembered) {
          queue->remember(written.span());
          queue->remember(read.span());
          queue->remember(file);
        }
        InFlight requests;
        for (std::size_t i = 0; i < pieces; ++i) {
          const auto memory = written.span().subspan(i * piece, piece);
          fill_pattern(memory, i);
          requests.add(queue->submit({IoKind::write, &file, i * piece, memory}));
        }
        requests.wait();
        queue->submit({IoKind::flush, &file, 0, {}}).wait();
        CHECK(file.bytes() == pieces * piece);
        for (std::size_t i = 0; i < pieces; ++i) {
          requests.add(queue->submit({IoKind::read, &file, i * piece, read.span().subspan(i * piece, piece)}));
        }
        requests.wait();
        for (std::size_t i = 0; i < pieces; ++i) {
          CHECK(holds_pattern(read.span().subspan(i * piece, piece), i));
        }
        if (remembered) {
          queue->forget(file);
          queue->forget(read.span());
          queue->forget(written.span());
        }
      }
    }
  }
}

TEST_CASE("every queue takes requests from several threads") {
  for (const QueueKind& kind : queue_kinds()) {
    INFO(kind.name);
    const TemporaryDirectory directory;
    const File file(directory.path() / "file", {.create = true});
    const auto queue = kind.make({.depth = 3});
    constexpr std::size_t threads = 4;
    constexpr std::size_t rounds = 30;
    const Aligned memory(threads * piece);
    std::vector<int> wrong(threads);
    std::vector<std::thread> workers;
    for (std::size_t thread = 0; thread < threads; ++thread) {
      workers.emplace_back([&, thread] {
        const auto mine = memory.span().subspan(thread * piece, piece);
        for (std::size_t round = 0; round < rounds; ++round) {
          fill_pattern(mine, thread + round * threads);
          queue->submit({IoKind::write, &file, thread * piece, mine}).wait();
          fill_pattern(mine, 999);
          queue->submit({IoKind::read, &file, thread * piece, mine}).wait();
          if (!holds_pattern(mine, thread + round * threads)) ++wrong[thread];
        }
      });
    }
    for (std::thread& worker : workers) {
      worker.join();
    }
    CHECK(wrong == std::vector<int>(threads));
  }
}

TEST_CASE("every queue completes its requests in flight before it ends") {
  for (const QueueKind& kind : queue_kinds()) {
    INFO(kind.name);
    const TemporaryDirectory directory;
    const File file(directory.path() / "file", {.create = true});
    const Aligned memory(8 * piece);
    std::vector<Completion> completions;
    {
      const auto queue = kind.make({.depth = 8});
      for (std::size_t i = 0; i < 8; ++i) {
        completions.push_back(
            queue->submit({IoKind::write, &file, i * piece, memory.span().subspan(i * piece, piece)}));
      }
    }
    for (const Completion& completion : completions) {
      CHECK(completion.is_done());
      CHECK_NOTHROW(completion.wait());
    }
  }
}

TEST_CASE("every queue reports the end of a file and a full file, and continues") {
  for (const QueueKind& kind : queue_kinds()) {
    INFO(kind.name);
    const TemporaryDirectory directory;
    const File file(directory.path() / "file", {.create = true});
    const File device("/dev/full", {.direct = false});
    const Aligned memory(2 * piece);
    const auto queue = kind.make({});
    queue->submit({IoKind::write, &file, 0, memory.span().first(piece)}).wait();
    CHECK_THROWS_WITH(queue->submit({IoKind::read, &file, 0, memory.span()}).wait(),
                      Catch::Contains("read failed: No data available") && Catch::Contains(file.path().string()) &&
                          Catch::Contains(std::to_string(piece)));
    CHECK_THROWS_WITH(queue->submit({IoKind::write, &device, 0, memory.span()}).wait(), Catch::Contains("B2202"));
    CHECK_NOTHROW(queue->submit({IoKind::read, &file, 0, memory.span().first(piece)}).wait());
  }
}

TEST_CASE("a queue of depth 0 is refused") {
  for (const QueueKind& kind : queue_kinds()) {
    CHECK_THROWS_WITH(kind.make({.depth = 0}), Catch::Contains("B1001"));
  }
}

TEST_CASE("closed files and queues leave no descriptor") {
  const TemporaryDirectory directory;
  const std::size_t before = open_descriptors();
  {
    const File file(directory.path() / "file", {.create = true});
    for (int i = 0; i < 1000; ++i) {
      REQUIRE(File(file.path()).descriptor() >= 0);
      REQUIRE(File::nameless(directory.path()).descriptor() >= 0);
    }
    for (const QueueKind& kind : queue_kinds()) {
      for (int i = 0; i < 100; ++i) {
        const auto queue = kind.make({.depth = 2});
        queue->remember(file);
      }
    }
  }
  CHECK(open_descriptors() == before);
}

TEST_CASE("io_uring continues after short transfers") {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "pipe";  // a read returns the bytes that are in it
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  const File pipe(path, {.direct = false});
  for (const QueueKind& kind : queue_kinds()) {
    if (kind.name != "io_uring") continue;  // pread() refuses pipes
    const Aligned sent(piece);
    const Aligned read(piece);
    fill_pattern(sent.span(), 5);
    const auto queue = kind.make({});
    const Completion done = queue->submit({IoKind::read, &pipe, 0, read.span()});
    for (std::size_t first = 0; first < piece; first += piece / 8) {
      CHECK_FALSE(done.wait_for(std::chrono::milliseconds(2)));
      REQUIRE(::write(pipe.descriptor(), sent.span().data() + first, piece / 8) == static_cast<ssize_t>(piece / 8));
    }
    done.wait();
    CHECK(std::ranges::equal(sent.span(), read.span()));
  }
}

TEST_CASE("planned faults occur, and transient ones are hidden") {
  const TemporaryDirectory directory;
  const File file(directory.path() / "file", {.create = true});
  const auto calls = std::make_shared<FaultyCalls>();
  const auto queue = thread_queue({.depth = 2}, [calls](const IoRequest& request) { return (*calls)(request); });
  const Aligned memory(piece);
  fill_pattern(memory.span(), 1);
  using What = Fault::What;
  calls->plan(IoKind::write, {{What::error, EINTR, 0},
                              {What::short_transfer, 0, block_bytes},
                              {What::error, EAGAIN, 0},
                              {What::short_transfer, 0, 3 * block_bytes},
                              {What::delay, 0, 5}});
  queue->submit({IoKind::write, &file, 0, memory.span()}).wait();
  CHECK(calls->left(IoKind::write) == 0);
  CHECK(calls->calls(IoKind::write) == 5);
  fill_pattern(memory.span(), 2);
  queue->submit({IoKind::read, &file, 0, memory.span()}).wait();
  CHECK(holds_pattern(memory.span(), 1));

  for (const int error : {EIO, ENODATA, EROFS}) {
    calls->plan_error(IoKind::read, error);
    CHECK_THROWS_WITH(queue->submit({IoKind::read, &file, 0, memory.span()}).wait(), Catch::Contains("B3201"));
  }
  calls->plan_error(IoKind::flush, EIO);
  CHECK_THROWS_WITH(queue->submit({IoKind::flush, &file, 0, {}}).wait(), Catch::Contains("flush failed"));
  CHECK_NOTHROW(queue->submit({IoKind::flush, &file, 0, {}}).wait());
}

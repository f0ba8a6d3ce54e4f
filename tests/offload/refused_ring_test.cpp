// Tests of a ring that the kernel refuses to enter: no thread waits for ever, no byte is lost, and the log says it.
#include <ballast/error.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <csignal>
#include <string>

#include "tests/offload/aligned.h"
#include "tests/offload/faulty_calls.h"
#include "tests/skip.h"
#include "tests/temporary_directory.h"

using namespace ballast;
using namespace ballast::offload;

namespace {

constexpr std::size_t pieces = 8;
constexpr std::size_t bytes_each = 4 * block_bytes;
constexpr std::string_view no_uring = "no io_uring here";

// A queue whose ring can be refused, a file, and memory.
class RefusedRing {
 public:
  RefusedRing() {
    try {
      queue = uring_queue({.depth = 4, .log = &log}, ring.entry());
    } catch (const ResourceError&) {
      return;
    }
    queue->remember(memory.span());
    queue->remember(file);
  }

  std::span<std::byte> at(std::size_t number) const { return memory.span().subspan(number * bytes_each, bytes_each); }

  // Writes, flushes and reads. Returns false if other bytes come back.
  bool works(std::size_t seed) const {
    InFlight requests;
    for (std::size_t i = 0; i < pieces; ++i) {
      fill_pattern(at(i), seed + i);
      requests.add(queue->submit({IoKind::write, &file, i * bytes_each, at(i)}));
    }
    requests.wait();
    queue->submit({IoKind::flush, &file, 0, {}}).wait();
    for (std::size_t i = 0; i < pieces; ++i) {
      fill_pattern(at(i), 999);
      requests.add(queue->submit({IoKind::read, &file, i * bytes_each, at(i)}));
    }
    requests.wait();
    for (std::size_t i = 0; i < pieces; ++i) {
      if (!holds_pattern(at(i), seed + i)) return false;
    }
    return true;
  }

  std::string lines;  // the lines of the log; read them after the queue has ended
  Log log{[this](Level, std::string_view line) { lines.append(line).append("\n"); }};
  FaultyRing ring;
  TemporaryDirectory directory;
  File file{directory.path() / "file", {.create = true}};
  Aligned memory{pieces * bytes_each};
  std::unique_ptr<IoQueue> queue;
};

// Returns the descriptor of the only ring of this process, or -1.
int descriptor_of_ring() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed_by_now;
    const bool found = std::filesystem::read_symlink(entry, closed_by_now) == "anon_inode:[io_uring]";
    if (found) return std::stoi(entry.path().filename());
  }
  return -1;
}

}  // namespace

TEST_CASE("a few refusals in a row are hidden") {
  for (const int error : {EAGAIN, EBUSY, ENOMEM, EPERM}) {
    RefusedRing rig;
    if (rig.queue == nullptr) return skip(no_uring);
    for (std::size_t time = 0; time < 3; ++time) {
      rig.ring.refuse(error, FaultyRing::given_up_after - 1);
      CHECK(rig.works(time));
    }
    CHECK(rig.queue->kind() == "io_uring");
    rig.queue.reset();
    CHECK(rig.lines.empty());
  }
}

TEST_CASE("interruptions by signals do not count as refusals") {
  RefusedRing rig;
  if (rig.queue == nullptr) return skip(no_uring);
  rig.ring.refuse(EINTR, 100 * FaultyRing::given_up_after);
  CHECK(rig.works(1));
  CHECK(rig.queue->kind() == "io_uring");
}

TEST_CASE("a ring that is refused every time is given up, and a thread serves its requests") {
  for (const int error : {EAGAIN, EPERM, ENXIO, EBADF}) {
    for (const auto which : {FaultyRing::Which::all, FaultyRing::Which::submissions, FaultyRing::Which::waits}) {
      CAPTURE(error, static_cast<int>(which));
      RefusedRing rig;
      if (rig.queue == nullptr) return skip(no_uring);
      CHECK(rig.works(1));
      rig.ring.refuse(error, FaultyRing::always, which);
      CHECK(rig.works(2));
      while (rig.queue->kind() != "one thread") {
        CHECK(rig.works(3));
      }
      CHECK(rig.works(4));
      rig.queue->forget(rig.file);
      rig.queue->forget(rig.memory.span());
      rig.queue.reset();
      CHECK_THAT(rig.lines,
                 Catch::StartsWith("io_uring is given up: the kernel refused io_uring_enter 5 times in a row (" +
                                   std::generic_category().message(error)));
      CHECK(std::ranges::count(rig.lines, '\n') == 1);
    }
  }
}

TEST_CASE("a ring whose descriptor was closed is given up, and a file that reuses it is left alone") {
  for (const bool is_reused : {false, true}) {
    CAPTURE(is_reused);
    RefusedRing rig;
    if (rig.queue == nullptr) return skip(no_uring);
    CHECK(rig.works(1));
    const int ring = descriptor_of_ring();
    REQUIRE(::close(ring) == 0);
    if (is_reused) REQUIRE(::dup2(rig.file.descriptor(), ring) == ring);
    CHECK(rig.works(2));
    CHECK(rig.queue->kind() == "one thread");
    rig.queue.reset();
    CHECK((::close(ring) == 0) == is_reused);
  }
}

TEST_CASE("a ring that is refused does not delay the end of its queue") {
  for (int time = 0; time < 20; ++time) {
    RefusedRing rig;
    if (rig.queue == nullptr) return skip(no_uring);
    const Completion last = rig.queue->submit({IoKind::write, &rig.file, 0, rig.at(0)});
    rig.ring.refuse(EPERM);
    rig.queue.reset();
    CHECK(last.is_done());
    CHECK_NOTHROW(last.wait());
  }
}

TEST_CASE("requests that a ring never answers are repeated, but a flush fails instead") {
  RefusedRing rig;
  if (rig.queue == nullptr) return skip(no_uring);
  fill_pattern(rig.at(0), 7);
  rig.ring.lose_next_submission();
  rig.ring.refuse(ENXIO);
  rig.queue->submit({IoKind::write, &rig.file, 0, rig.at(0)}).wait();
  fill_pattern(rig.at(0), 8);
  rig.queue->submit({IoKind::read, &rig.file, 0, rig.at(0)}).wait();
  CHECK(holds_pattern(rig.at(0), 7));

  RefusedRing other;
  other.ring.lose_next_submission();
  other.ring.refuse(ENXIO);
  CHECK_THROWS_WITH(other.queue->submit({IoKind::flush, &other.file, 0, {}}).wait(),
                    Catch::Contains("B3201") && Catch::Contains("cannot finish a flush: its answer is lost") &&
                        Catch::Contains("5 times in a row (No such device or address)") &&
                        Catch::Contains(other.file.path().string()));
  CHECK(other.works(1));
}

TEST_CASE("a request ends only when an abandoned ring can no longer touch its memory") {
  RefusedRing rig;
  if (rig.queue == nullptr) return skip(no_uring);
  const auto path = rig.directory.path() / "pipe";
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  const File pipe(path, {.direct = false});
  const Completion waits = rig.queue->submit({IoKind::read, &pipe, 0, rig.at(0)});  // taken, and never answered
  rig.queue->submit({IoKind::write, &rig.file, 0, rig.at(1)}).wait();
  rig.ring.refuse(EPERM);
  rig.queue->submit({IoKind::write, &rig.file, 0, rig.at(1)}).wait();
  CHECK_THROWS_WITH(waits.wait(), Catch::Contains("Illegal seek"));  // the call that repeats it fails
  std::byte sent{5};
  std::byte read{};
  REQUIRE(::write(pipe.descriptor(), &sent, 1) == 1);
  CHECK(::read(pipe.descriptor(), &read, 1) == 1);  // no ring has taken the byte
  CHECK(read == sent);
}

TEST_CASE("giving up a ring does not wait for a child that was forked meanwhile") {
  RefusedRing rig;
  if (rig.queue == nullptr) return skip(no_uring);
  CHECK(rig.works(1));
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  rig.ring.lose_next_submission();
  rig.ring.refuse(EPERM);
  CHECK(rig.works(2));
  CHECK(rig.queue->kind() == "one thread");
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

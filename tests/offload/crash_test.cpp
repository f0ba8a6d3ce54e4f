// Tests in which a process is killed or a drive loses power, at any moment. Afterwards the store holds exactly one
// committed step, never a mixture.
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <random>
#include <thread>

#include "tests/offload/faulty_calls.h"
#include "tests/offload/store_rig.h"
#include "tests/offload/test_queues.h"

using namespace ballast;
using namespace ballast::offload;

namespace {

constexpr RecordShape shape{.run_id = 5, .tiles = 7, .payload_bytes = 9000, .first_bytes = 4000};

std::uint64_t key(std::uint64_t step, std::size_t tile) { return 1000 * step + tile; }

// Reads every tile, and returns whether the store's step wrote it. Step 0 wrote zeros.
bool is_one_step(const RecordStore& store, std::span<std::byte> record) {
  for (std::size_t tile = 0; tile < shape.tiles; ++tile) {
    const auto payload = store.read(tile, record).payload();
    const bool holds = store.step() == 0 ? std::ranges::all_of(payload, [](std::byte b) { return b == std::byte{0}; })
                                         : holds_pattern(payload, key(store.step(), tile));
    if (!holds) return false;
  }
  return store.note().size() == store.step() % 100;
}

// Reads, changes and writes each tile, with several records in flight.
void train_a_step(RecordStore& store, std::span<std::byte> memory) {
  const std::uint64_t next = store.step() + 1;
  InFlight writes;
  for (std::size_t tile = 0; tile < shape.tiles; ++tile) {
    const auto record = memory.subspan(tile * store.record_bytes(), store.record_bytes());
    store.read(tile, record).payload();
    fill_pattern(store.payload(record), key(next, tile));
    writes.add(store.write(tile, record));
  }
  writes.wait();
  store.commit(next, std::vector<std::byte>(next % 100));
}

std::unique_ptr<IoQueue> queue_of(std::size_t round) {
  const auto kinds = queue_kinds();
  return kinds[round % kinds.size()].make({.depth = 4});
}

// The child process: it trains until it is killed. If it ends before, its exit code says why.
[[noreturn]] void train_for_ever(std::span<const std::filesystem::path> directories, std::size_t round, int progress) {
  try {
    const auto queue = queue_of(round);
    std::vector<Drive> drives;
    for (const auto& directory : directories) {
      drives.push_back({directory, queue.get()});
    }
    RecordStore store = RecordStore::open(shape, drives);
    const Aligned memory(shape.tiles * store.record_bytes());
    while (true) {
      if (::write(progress, "!", 1) != 1) ::_exit(3);
      train_a_step(store, memory.span());
    }
  } catch (const std::exception&) {
    ::_exit(2);
  }
}

void kill_at_random(std::size_t kills, unsigned seed) {
  const TemporaryDirectory one;
  const TemporaryDirectory two;
  const std::vector<std::filesystem::path> directories{one.path(), two.path()};
  std::mt19937 random(seed);
  std::uint64_t last_step = 0;
  {
    const auto queue = thread_queue();
    const std::vector<Drive> drives{{one.path(), queue.get()}, {two.path(), queue.get()}};
    RecordStore::create(shape, drives);
  }
  for (std::size_t round = 0; round < kills; ++round) {
    int progress[2];
    REQUIRE(::pipe(progress) == 0);
    const pid_t child = ::fork();  // no threads here: queues live for a moment only
    if (child == 0) train_for_ever(directories, round, progress[1]);
    ::close(progress[1]);
    for (std::size_t steps = 0; steps <= round % 3; ++steps) {  // kill it in its first step, or after one or two
      char byte = 0;
      REQUIRE(::read(progress[0], &byte, 1) == 1);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 6000));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    ::close(progress[0]);
    REQUIRE(WIFSIGNALED(status));

    const auto queue = thread_queue({.depth = 2});
    const std::vector<Drive> drives{{one.path(), queue.get()}, {two.path(), queue.get()}};
    const RecordStore store = RecordStore::open(shape, drives);
    const Aligned record(store.record_bytes());
    REQUIRE(is_one_step(store, record.span()));
    REQUIRE(store.step() >= last_step);
    last_step = store.step();
  }
  CHECK(last_step >= kills / 3 * 3);  // the steps that the loop waited for
}

// The drive dies after `calls` calls, loses unflushed writes, and comes back.
void lose_power_after(std::size_t calls, ForgetfulDrive::Forgets forgets) {
  const TemporaryDirectory directory;
  const auto drive = std::make_shared<ForgetfulDrive>();
  const auto queue = thread_queue({.depth = 3}, [drive](const IoRequest& request) { return (*drive)(request); });
  const Drive drives[] = {{directory.path(), queue.get()}};
  std::uint64_t committed = 0;
  {
    RecordStore store = RecordStore::create(shape, drives);
    const Aligned memory(shape.tiles * store.record_bytes());
    drive->die_after(calls);
    try {
      while (true) {
        train_a_step(store, memory.span());
        committed = store.step();
      }
    } catch (const std::exception&) {
      store.abandon();
      drive->lose_power(forgets, static_cast<unsigned>(calls));
    }
  }
  const auto later = thread_queue({.depth = 2});
  const Drive same[] = {{directory.path(), later.get()}};
  const RecordStore store = RecordStore::open(shape, same);
  const Aligned record(store.record_bytes());
  CHECK(is_one_step(store, record.span()));
  // Every acknowledged commit is there. A commit that was in flight may have arrived.
  CHECK(store.step() >= committed);
  CHECK(store.step() <= committed + 1);
  if (forgets == ForgetfulDrive::Forgets::everything) CHECK(store.step() == committed);
}

}  // namespace

TEST_CASE("after kill -9 at any moment, the store holds one committed step") { kill_at_random(150, 1); }

TEST_CASE("after kill -9, five thousand times, the store holds one committed step", "[.thousands]") {
  kill_at_random(5000, 2);
}

TEST_CASE("after power loss at any moment, the store holds one committed step") {
  // A step takes 7 reads, 7 writes, a flush, a commit and a flush.
  for (std::size_t calls = 0; calls < 60; ++calls) {
    INFO("after " << calls << " calls");
    lose_power_after(calls, ForgetfulDrive::Forgets::everything);
    lose_power_after(calls, ForgetfulDrive::Forgets::at_random);
  }
}

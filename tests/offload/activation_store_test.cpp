// Tests that activations come back with their bits, from memory and from a drive, and what happens where a drive fails.
#include "offload/activation_store.h"

#include <ballast/error.h>

#include <sys/resource.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <chrono>
#include <thread>

#include "tests/limited_child.h"
#include "tests/offload/aligned.h"
#include "tests/offload/faulty_calls.h"
#include "tests/offload/test_queues.h"
#include "tests/temporary_directory.h"

using namespace ballast;
using namespace ballast::offload;
using Catch::Contains;
using Ticket = ActivationStore::Ticket;

namespace {

constexpr std::size_t piece_bytes = 2 * block_bytes;
constexpr std::size_t buffer_count = 4;

struct ActivationRig {
  ActivationOptions options() const {
    return {.directory = directory.path(), .memory_bytes = buffer_count * piece_bytes, .piece_bytes = piece_bytes};
  }
  std::unique_ptr<IoQueue> faulty_queue(std::size_t threads = 1) {
    return thread_queue({.depth = threads}, [this](const IoRequest& request) { return calls(request); });
  }
  // Waits until this many writes have begun, so that the next planned fault is one of a later write.
  void wait_for_writes(std::size_t count) const {
    while (calls.calls(IoKind::write) < count)
      std::this_thread::yield();
  }

  TemporaryDirectory directory;
  FaultyCalls calls;
};

Ticket save_pattern(ActivationStore& store, std::size_t bytes, std::uint64_t key) {
  std::vector<std::byte> content(bytes);
  fill_pattern(content, key);
  const Ticket ticket = store.save(content).ticket;
  fill_pattern(content, 0);  // the store has its own copy
  return ticket;
}

bool loads_pattern(ActivationStore& store, Ticket ticket, std::size_t bytes, std::uint64_t key) {
  std::vector<std::byte> content(bytes);
  store.load(ticket, content);
  return holds_pattern(content, key);
}

// A step of a training: everything that is saved is loaded in reverse order, and dropped.
void train_step(ActivationStore& store, std::uint64_t key) {
  const std::vector<std::size_t> sizes{1,  piece_bytes, 3 * piece_bytes + 5, 100, 9 * piece_bytes, 2 * piece_bytes - 1,
                                       777};
  std::vector<Ticket> tickets;
  for (std::size_t i = 0; i < sizes.size(); ++i)
    tickets.push_back(save_pattern(store, sizes[i], key + i));
  for (std::size_t i = sizes.size(); i-- > 0;) {
    INFO("activation " << i);
    CHECK(loads_pattern(store, tickets[i], sizes[i], key + i));
    store.drop(tickets[i]);
  }
}

}  // namespace

TEST_CASE("activations are loaded as they were saved, from a drive with every queue, and from memory") {
  const ActivationRig rig;
  for (const QueueKind& kind : queue_kinds()) {
    INFO(kind.name);
    ActivationStore store(rig.options(), kind.make({.depth = 4}));
    for (std::uint64_t number = 0; number < 5; ++number)
      train_step(store, 100 * number);
    CHECK(store.counters().kept_bytes == 0);
    CHECK(store.counters().read_bytes > 0);
    CHECK(store.counters().host_bytes == buffer_count * piece_bytes);
  }
  ActivationStore in_memory({.piece_bytes = piece_bytes});
  for (std::uint64_t number = 0; number < 5; ++number)
    train_step(in_memory, 100 * number);
  CHECK(in_memory.counters().written_bytes == 0);
  CHECK(in_memory.counters().host_bytes <= 32 * piece_bytes);
}

TEST_CASE("activations can be loaded in any order, more than once, and next to those of another graph") {
  const ActivationRig rig;
  ActivationStore store(rig.options());
  std::vector<Ticket> tickets;
  for (std::uint64_t i = 0; i < 12; ++i)
    tickets.push_back(save_pattern(store, piece_bytes + i, i));
  for (const std::size_t i : {3u, 3u, 11u, 0u, 7u, 3u, 10u, 9u, 8u, 11u})
    CHECK(loads_pattern(store, tickets[i], piece_bytes + i, i));
  store.drop(tickets[7]);
  const Ticket later = save_pattern(store, 5 * piece_bytes, 99);
  for (const std::size_t i : {11u, 6u, 5u, 0u})
    CHECK(loads_pattern(store, tickets[i], piece_bytes + i, i));
  CHECK(loads_pattern(store, later, 5 * piece_bytes, 99));
  CHECK_THROWS_WITH(store.drop(tickets[7]), Contains("B1999"));
  std::vector<std::byte> small(1);
  CHECK_THROWS_WITH(store.load(later, small), Contains("B1002") || Contains("B1003"));
}

TEST_CASE("the last bytes are still in buffers, and those saved before them are prefetched") {
  const ActivationRig rig;
  ActivationStore store(rig.options());
  constexpr std::size_t count = 3 * buffer_count;
  std::vector<Ticket> tickets;
  for (std::uint64_t i = 0; i < count; ++i)
    tickets.push_back(save_pattern(store, piece_bytes, i));
  CHECK(store.counters().written_bytes == count * piece_bytes);
  for (std::size_t i = 0; i < count; ++i)
    CHECK(store.is_in_memory(tickets[i]) == (i >= count - buffer_count));
  CHECK(loads_pattern(store, tickets[count - 1], piece_bytes, count - 1));
  store.drop(tickets[count - 1]);
  CHECK(store.counters().read_bytes == 0);
  do {  // the loop ends when the write of the dropped piece has ended, and its buffer is free
    CHECK(loads_pattern(store, tickets[count - 2], piece_bytes, count - 2));
  } while (!store.is_in_memory(tickets[count - 1 - buffer_count]));
  CHECK(!store.is_in_memory(tickets[0]));
}

TEST_CASE("memory and the file stay as large as one step needs, and the file has no name") {
  const ActivationRig rig;
  ActivationStore store(rig.options());
  train_step(store, 0);
  const std::size_t drive_bytes = store.counters().drive_bytes;
  CHECK(drive_bytes >= 16 * piece_bytes);
  for (std::uint64_t number = 1; number < 30; ++number)
    train_step(store, 100 * number);
  CHECK(store.counters().drive_bytes <=
        drive_bytes + buffer_count * piece_bytes);  // writes of dropped pieces may not have ended
  CHECK(store.counters().host_bytes == buffer_count * piece_bytes);
  CHECK(std::filesystem::is_empty(rig.directory.path()));
}

TEST_CASE("an activation that is dropped during its write does not damage the one that takes its place") {
  ActivationRig rig;
  ActivationStore store(rig.options(), rig.faulty_queue(2));
  constexpr std::size_t milliseconds = 50;
  rig.calls.plan(IoKind::write, {{.what = Fault::What::delay, .amount = milliseconds}});
  const Ticket dropped = save_pattern(store, piece_bytes, 1);
  rig.wait_for_writes(1);
  store.drop(dropped);
  const Ticket next = save_pattern(store, piece_bytes, 2);
  save_pattern(store, buffer_count * piece_bytes, 3);
  std::this_thread::sleep_for(std::chrono::milliseconds(2 * milliseconds));  // the delayed write has ended by then
  CHECK(loads_pattern(store, next, piece_bytes, 2));
}

TEST_CASE("a full drive is an error, nothing is lost, and saving works again when there is space") {
  ActivationRig rig;
  ActivationStore store(rig.options(), rig.faulty_queue());
  const Ticket before = save_pattern(store, 3 * piece_bytes, 1);
  CHECK(loads_pattern(store, save_pattern(store, 3 * piece_bytes, 2), 3 * piece_bytes, 2));
  std::vector<Ticket> kept;
  rig.wait_for_writes(6);
  rig.calls.plan_error(IoKind::write, ENOSPC, 2);
  CHECK_THROWS_WITH(
      [&] {
        for (std::uint64_t i = 0; i < 3 * buffer_count; ++i)
          kept.push_back(save_pattern(store, piece_bytes, 10 + i));
      }(),
      Contains("B2202") && Contains("cannot write activations") && Contains(rig.directory.path().string()) &&
          Contains("checkpointing"));
  CHECK(rig.calls.left(IoKind::write) == 0);
  for (const Ticket ticket : kept)
    store.drop(ticket);
  CHECK(loads_pattern(store, before, 3 * piece_bytes, 1));
  train_step(store, 100);
}

TEST_CASE("a failed write is an error when its buffer is needed, and a failed read can be repeated") {
  ActivationRig rig;
  ActivationStore store(rig.options(), rig.faulty_queue());
  rig.calls.plan_error(IoKind::write, EIO);
  const Ticket first = save_pattern(store, piece_bytes, 1);
  CHECK_THROWS_WITH(save_pattern(store, buffer_count * piece_bytes, 2),
                    Contains("B3201") && Contains("Input/output error"));
  CHECK(loads_pattern(store, first, piece_bytes, 1));  // the piece is still in its buffer
  store.drop(first);
  const Ticket second = save_pattern(store, piece_bytes, 3);
  const Ticket third = save_pattern(store, buffer_count * piece_bytes, 4);
  rig.calls.plan_error(IoKind::read, EIO);
  CHECK_THROWS_WITH(loads_pattern(store, second, piece_bytes, 3),
                    Contains("B3201") && Contains("cannot read activations"));
  CHECK(loads_pattern(store, second, piece_bytes, 3));
  CHECK(loads_pattern(store, third, buffer_count * piece_bytes, 4));
}

TEST_CASE("a flipped bit is found") {
  ActivationRig rig;
  ActivationStore store(rig.options(), rig.faulty_queue());
  const Ticket first = save_pattern(store, piece_bytes - 100, 1);
  save_pattern(store, buffer_count * piece_bytes, 2);
  rig.calls.plan(IoKind::read, {{.what = Fault::What::flipped_bit, .amount = 8 * 5000 + 3}});
  CHECK_THROWS_WITH(loads_pattern(store, first, piece_bytes - 100, 1),
                    Contains("B3202") && Contains(rig.directory.path().string()));
  CHECK(loads_pattern(store, first, piece_bytes - 100, 1));
}

TEST_CASE("a write that never reached the drive is found") {
  ActivationRig rig;
  ActivationStore store(rig.options(), rig.faulty_queue());
  store.drop(save_pattern(store, piece_bytes, 1));
  rig.wait_for_writes(1);
  rig.calls.plan(IoKind::write, {{.what = Fault::What::torn_write, .amount = 0}});  // the drive keeps the old bytes
  const Ticket second = save_pattern(store, piece_bytes, 2);
  save_pattern(store, buffer_count * piece_bytes, 3);
  CHECK_THROWS_WITH(loads_pattern(store, second, piece_bytes, 2), Contains("B3202"));
}

TEST_CASE("a limit on the size of files is an error before the kernel ends the process") {
  const std::string output = testing::in_a_child([]() -> std::string {
    const ActivationRig rig;
    const struct rlimit limit { 3 * piece_bytes, 3 * piece_bytes };
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ActivationStore store(rig.options());
    for (std::uint64_t i = 0; i < 4; ++i)
      save_pattern(store, piece_bytes, i);
    return "no error";
  });
  CHECK_THAT(output, Contains("B2202") && Contains("ulimit -f"));
}

TEST_CASE("several threads save, load and drop") {
  const ActivationRig rig;
  ActivationStore store(rig.options());
  std::vector<std::thread> threads;
  std::array<int, 4> wrong{};
  for (std::size_t number = 0; number < wrong.size(); ++number) {
    threads.emplace_back([&, number] {
      for (std::uint64_t i = 0; i < 20; ++i) {
        const std::uint64_t key = 100 * number + i;
        const Ticket one = save_pattern(store, 2 * piece_bytes + 1, key);
        const Ticket other = save_pattern(store, piece_bytes, key + 50);
        wrong[number] += loads_pattern(store, other, piece_bytes, key + 50) ? 0 : 1;
        store.drop(other);
        wrong[number] += loads_pattern(store, one, 2 * piece_bytes + 1, key) ? 0 : 1;
        store.drop(one);
      }
    });
  }
  for (std::thread& thread : threads)
    thread.join();
  CHECK(wrong == std::array<int, 4>{});
}

TEST_CASE("a GPU's activations are copied behind its work, and return in its order", "[gpu]") {
  const ActivationRig rig;
  MemoryAccounts accounts;
  const Stream trainer;
  constexpr std::size_t bytes = 6 * piece_bytes + 10;
  const auto on_gpu = [&] { return allocate(accounts, {.kind = MemoryKind::device, .bytes = bytes, .owner = "test"}); };
  const Buffer memory = on_gpu();
  const Buffer back = allocate(accounts, {.kind = MemoryKind::pinned, .bytes = bytes, .owner = "test"});
  for (const std::filesystem::path& directory : {std::filesystem::path(), rig.directory.path()}) {
    INFO("directory " << directory.string());
    ActivationOptions options = rig.options();
    options.directory = directory;
    options.gpu = 0;
    ActivationStore store(options);
    std::vector<Ticket> tickets;
    for (unsigned char value = 1; value <= 9; ++value) {
      fill(memory.data(), value, bytes, trainer);
      const ActivationStore::Saved saved = store.save({memory.data(), bytes}, trainer.handle());
      saved.copied.order(trainer);  // the next fill comes after the copy
      tickets.push_back(saved.ticket);
    }
    for (unsigned char value = 9; value >= 1; --value) {
      fill(memory.data(), 0, bytes, trainer);  // the copy comes after it
      store.load(tickets[value - 1u], {memory.data(), bytes}, trainer.handle()).order(trainer);
      copy(back.data(), memory.data(), bytes, trainer);
      trainer.synchronize();
      CHECK(std::all_of(back.data(), back.data() + bytes, [&](std::byte byte) { return byte == std::byte{value}; }));
      store.drop(tickets[value - 1u]);
    }
  }
}

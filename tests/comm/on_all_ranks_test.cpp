#include <ballast/error.h>

#include "zero/comm/on_all_ranks.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <set>
#include <thread>

#include "tests/zero/forwarding_communicator.h"
#include "zero/comm/thread_communicator.h"

using namespace ballast;

namespace {

// Returns the error of each of three ranks, without the place where it was raised.
std::vector<std::string> errors(const std::function<void(std::size_t rank)>& work) {
  ThreadGroup group(3, std::chrono::seconds(30));
  std::vector<std::string> errors(group.size());
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < group.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      const auto backend = kernels::cpu_backend({.threads = 1});
      const auto world = thread_communicator(group, rank, *backend);
      try {
        on_all_ranks(*world, [&] { work(rank); });
      } catch (const Error& error) {
        const auto& [what, where, needed, available, remedy] = error.problem();
        for (const std::string& part : {label(error.code()), what, where, needed, available, remedy})
          errors[rank] += part + "|";
      }
      world->barrier();  // the group still works
    });
  }
  for (std::thread& rank : ranks)
    rank.join();
  return errors;
}

class WithoutExchange final : public testing::ForwardingCommunicator {
 public:
  explicit WithoutExchange(Communicator& inner) : ForwardingCommunicator(inner) {}
  void exchange(std::span<const SentPart> sent, std::span<const ReceivedPart> received) override {
    Communicator::exchange(sent, received);
  }
};

std::string text_of(std::size_t rank) { return std::string(rank % 3 * 50, static_cast<char>(rank)); }

std::vector<std::string> texts_of(std::size_t ranks) {
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    texts.push_back(text_of(rank));
  return texts;
}

// Runs `body` on so many threads.
void on_threads(std::size_t ranks, const std::function<void(Communicator& world)>& body) {
  std::vector<std::thread> threads;
  for (auto& each : thread_ranks(ranks))
    threads.emplace_back([&body, world = std::move(each)] { body(*world); });
  for (std::thread& thread : threads)
    thread.join();
}

}  // namespace

TEST_CASE("work that succeeds on all ranks throws on none, and work that fails on one throws on all") {
  CHECK(errors([](std::size_t) {}) == std::vector<std::string>(3));
  const auto fails_on_1 = [](std::size_t rank) {
    if (rank == 1) fail(Code::drive_full, {.what = "full", .where = "/drive", .needed = "2", .available = "1"});
  };
  CHECK(errors(fails_on_1) == std::vector<std::string>(3, "B2202|full|rank 1: /drive|2|1||"));
}

TEST_CASE("of several errors, all ranks throw that of the lowest rank, also for foreign exceptions") {
  const auto fails = [](std::size_t rank) {
    if (rank == 1) std::filesystem::create_directory("/proc/none/none");
    if (rank == 2) fail(Code::internal, {.what = "later"});
  };
  CHECK(errors(fails) == std::vector<std::string>(3, "B3201|No such file or directory|rank 1: /proc/none/none||||"));
  const auto throws = [](std::size_t rank) {
    if (rank == 0) throw std::runtime_error("else");
  };
  CHECK(errors(throws) == std::vector<std::string>(3, "B1999|else|rank 0||||"));
}

TEST_CASE("ranks get the texts of all, of different lengths and bytes, and each is sent once to each other rank") {
  for (const std::size_t ranks : {1u, 4u, 16u}) {
    std::vector<std::vector<std::string>> texts(ranks);
    std::vector<std::size_t> sent(ranks);
    on_threads(ranks, [&](Communicator& world) {
      texts[world.rank()] = texts_of_all(world, text_of(world.rank()));
      sent[world.rank()] = world.sent().inside + world.sent().across;
    });
    CHECK(texts == std::vector(ranks, texts_of(ranks)));
    for (std::size_t rank = 0; rank < ranks; ++rank)
      CHECK(sent[rank] == (ranks - 1) * (sizeof(std::uint64_t) + text_of(rank).size()));
  }
}

TEST_CASE("ranks get the texts of all through a communicator that has no exchange of parts") {
  std::vector<std::vector<std::string>> texts(4);
  on_threads(4, [&](Communicator& world) {
    WithoutExchange plain(world);
    texts[world.rank()] = texts_of_all(plain, text_of(world.rank()));
  });
  CHECK(texts == std::vector(texts.size(), texts_of(4)));
}

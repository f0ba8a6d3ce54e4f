#include <ballast/error.h>

#include "zero/comm/on_all_ranks.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <set>
#include <thread>

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

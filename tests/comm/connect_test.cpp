// Tests of the rendezvous of ranks, and of its errors.
#include <ballast/error.h>

#include <fmt/format.h>

#include "zero/comm/connect.h"
#include "zero/comm/deadline.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <fstream>
#include <string>
#include <thread>

#include "tests/comm/process_groups.h"
#include "zero/comm/socket.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

constexpr auto brief = std::chrono::milliseconds(1500);

// Returns a port that is free now.
std::uint16_t free_port() { return local_endpoint(listen_at({"127.0.0.1", 0})).port; }

// Connects by address and port, as a launcher gives them.
void connect_rank(const Launch& launch, std::chrono::milliseconds timeout = patient, const RankBody& body = {}) {
  const auto backend = kernels::cpu_backend({.threads = 1});
  MemoryAccounts accounts;
  const auto ranks = connect({.launch = launch, .timeout = timeout}, {.backend = *backend, .accounts = accounts});
  ranks->barrier();
  if (body) body(*ranks);
}

Launch at(std::uint16_t port, std::size_t rank, std::size_t size, std::string job = "job") {
  return {.rank = rank, .size = size, .hub = {"127.0.0.1", port}, .job = std::move(job)};
}

}  // namespace

TEST_CASE("ranks connect at an address and a port, in any order") {
  const std::uint16_t port = free_port();
  for (const std::size_t late : {0u, 2u}) {
    Processes processes(3, [&](std::size_t rank) {
      if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      connect_rank(at(port, rank, 3));
    });
    CHECK(processes.failures() == Failures(3));
  }
}

TEST_CASE("ranks connect again at the same port, even if one is much faster") {
  const std::uint16_t port = free_port();
  Processes processes(3, [&](std::size_t rank) {
    for (std::size_t time = 0; time < 5; ++time) {
      connect_rank(at(port, rank, 3));
      if (rank == time % 3) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  });
  CHECK(processes.failures() == Failures(3));
}

TEST_CASE("without a launcher there is a single rank") {
  const auto backend = kernels::cpu_backend({.threads = 1});
  MemoryAccounts accounts;
  const Environment empty([](const std::string&) { return std::nullopt; });
  const auto alone = connect({}, {.backend = *backend, .accounts = accounts, .environment = empty});
  CHECK(alone->size() == 1);
  alone->barrier();
  CHECK(alone->split(0)->size() == 1);
}

TEST_CASE("a rank with another world size is refused, and the other ranks report it") {
  const std::uint16_t port = free_port();
  Processes processes(2, [&](std::size_t rank) { connect_rank(at(port, rank, 2 + rank), brief); });
  CHECK_THAT(processes.failure(1), Contains("B3303") && Contains("world size of 2, but rank 1 one of 3"));
  CHECK_THAT(processes.failure(0), Contains("B3303") && Contains("rank 1 did not connect within 1.5 s") &&
                                       Contains("world size of 2, but rank 1 one of 3"));
}

TEST_CASE("the second of two processes with the same rank is refused") {
  const std::uint16_t port = free_port();
  Processes processes(3, [&](std::size_t process) {
    if (process == 2) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    connect_rank(at(port, process == 0 ? 0 : 1, 3), brief);
  });
  CHECK_THAT(processes.failure(2), Contains("B3303") && Contains("has this rank already"));
  CHECK_THAT(processes.failure(0), Contains("rank 2 did not connect"));
}

TEST_CASE("a second job on the same port fails with the reason, and the first continues") {
  const std::uint16_t port = free_port();
  Processes processes(4, [&](std::size_t process) {
    const bool second = process >= 2;
    if (second) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    connect_rank(at(port, process % 2, 2, second ? "second" : "first"), brief, [&](Communicator& ranks) {
      std::this_thread::sleep_for(std::chrono::milliseconds(400));
      ranks.barrier();
    });
  });
  CHECK_THAT(processes.failure(2), Contains("B3303") && Contains("is in use") && Contains("BALLAST_PORT"));
  CHECK_THAT(processes.failure(3),
             Contains("B3303") && Contains("job \"first\" uses this address, not job \"second\""));
  CHECK(processes.failure(0).empty());
  CHECK(processes.failure(1).empty());
}

TEST_CASE("ranks that do not connect are named after the timeout") {
  const std::uint16_t port = free_port();
  Processes processes(1, [&](std::size_t) { connect_rank(at(port, 0, 3), std::chrono::milliseconds(300)); });
  CHECK_THAT(processes.failure(0), Contains("B3303") && Contains("rank 1, 2 did not connect within 0.3 s"));
  CHECK_THROWS_WITH(connect_rank(at(port, 1, 3), std::chrono::milliseconds(300)),
                    Contains("B3303") && Contains("cannot reach rank 0") && Contains(std::to_string(port)) &&
                        Contains("the last attempt failed: Connection refused"));
}

namespace {

// Returns when a process is connected to the port on this machine.
void wait_for_connection(std::uint16_t port) {
  const std::string local = fmt::format(":{:04X} ", port);
  constexpr std::string_view is_established = " 01 ";
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (std::chrono::steady_clock::now() < deadline) {
    for (const char* const table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
      std::ifstream file(table);
      for (std::string line; std::getline(file, line);) {
        const std::size_t at = line.find(local);
        if (at != std::string::npos && line.find(is_established, at) != std::string::npos) return;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace

TEST_CASE("a rank that dies before all ranks have connected is named at once") {
  const std::uint16_t port = free_port();
  Processes processes(2, [&](std::size_t rank) { connect_rank(at(port, rank, 3)); });
  wait_for_connection(port);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // rank 0 reads what the other one says of itself
  processes.send(1, SIGKILL);
  CHECK_THAT(processes.failure(0), Contains("B3303") && Contains("rank 1 (") && Contains("died"));
}

TEST_CASE("an impossible address is reported") {
  CHECK_THROWS_WITH(connect_rank({.rank = 0, .size = 2, .hub = {"192.0.2.1", 29500}}),
                    Contains("B3303") && Contains("192.0.2.1"));
  const Launch nowhere{.rank = 1, .size = 2, .hub = {"no.such.host.invalid", 29500}};
  CHECK_THROWS_WITH(
      connect_rank(nowhere, std::chrono::milliseconds(300)),
      Contains("B3303") && Contains("cannot reach rank 0") && Contains("cannot look up no.such.host.invalid: "));
}

TEST_CASE("an exception that ends a rank ends the other ranks") {
  const std::uint16_t port = free_port();
  Processes processes(3, [&](std::size_t rank) {
    connect_rank(at(port, rank, 3), patient, [](Communicator& ranks) {
      if (ranks.rank() == 1) throw std::runtime_error("no such data set");
      ranks.barrier();
    });
  });
  CHECK(processes.failure(1) == "no such data set");
  for (const std::size_t rank : {0u, 2u}) {
    CHECK_THAT(processes.failure(rank), Contains("B3301") && Contains("rank 1 (") && Contains("ended by an exception"));
  }
}

TEST_CASE("a communicator's memory is booked while it exists") {
  const TemporaryDirectory folder;
  Processes processes(2, [&](std::size_t rank) {
    const auto backend = kernels::cpu_backend({.threads = 1});
    MemoryAccounts accounts;
    FileStore store(folder.path());
    const ConnectOptions options{.launch = Launch{.rank = rank, .size = 2},
                                 .store = &store,
                                 .timeout = patient,
                                 .transport = HostTransport::shared_memory};
    {
      const auto ranks = connect(options, {.backend = *backend, .accounts = accounts});
      expect(accounts.usage(MemoryKind::pageable, "shared memory, group all").now > 256 * 1024, "booked");
      ranks->barrier();
    }
    expect(accounts.total(MemoryKind::pageable).now == 0, "released");
  });
  CHECK(processes.failures() == std::vector<std::string>(2));
}

TEST_CASE("a timeout that no clock can count to is for ever") {
  for (const std::string seconds : {"10000000000", "9223372036854775807"}) {
    const Environment environment([&](const std::string&) { return std::optional(seconds); });
    CHECK(timeout_of({}, environment) == longest_timeout);
  }
  CHECK(timeout_of({.timeout = std::chrono::milliseconds::max()}, Environment()) == longest_timeout);
}

TEST_CASE("the timeout comes from the environment") {
  const Environment environment([](const std::string& name) -> std::optional<std::string> {
    if (name == "BALLAST_TIMEOUT") return "0";
    return std::nullopt;
  });
  const auto backend = kernels::cpu_backend({.threads = 1});
  MemoryAccounts accounts;
  CHECK_THROWS_WITH(connect({.launch = Launch{.rank = 0, .size = 2}},
                            {.backend = *backend, .accounts = accounts, .environment = environment}),
                    Contains("B1006") && Contains("BALLAST_TIMEOUT=0"));
}

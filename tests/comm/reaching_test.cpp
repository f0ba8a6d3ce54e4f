// Tests of how ranks reach rank 0 and each other: names that appear late, names of the machine itself, and lost packets.
#include <ballast/error.h>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <list>
#include <thread>

#include "tests/comm/addresses.h"
#include "tests/comm/process_groups.h"
#include "tests/comm/resolver.h"
#include "tests/skip.h"
#include "zero/comm/admission.h"
#include "zero/comm/job.h"
#include "zero/comm/process_transport.h"
#include "zero/comm/socket.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr auto moment = std::chrono::milliseconds(300);
const std::string name_of_rank_0 = "rank-0.test";

bool has_address(const char* host) {
  try {
    listen_at({host, 0});
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Connects a rank to rank 0 at its name, as one of several hosts or of one.
void join_by_name(std::size_t rank, std::uint16_t port, std::size_t ranks_of_host, Log& log) {
  const auto backend = kernels::cpu_backend({.threads = 1});
  MemoryAccounts accounts;
  const std::map<std::string, std::string> variables{{"RANK", std::to_string(rank)},
                                                     {"WORLD_SIZE", "2"},
                                                     {"LOCAL_WORLD_SIZE", std::to_string(ranks_of_host)},
                                                     {"MASTER_ADDR", name_of_rank_0},
                                                     {"BALLAST_PORT", std::to_string(port)}};
  const Environment environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
  const auto ranks = connect({.timeout = patient, .transport = HostTransport::shared_memory, .log = &log},
                             {.backend = *backend, .accounts = accounts, .environment = environment});
  ranks->barrier();
}

void join_by_name(std::size_t rank, std::uint16_t port, std::size_t ranks_of_host) {
  Log log([](Level, std::string_view) {});
  join_by_name(rank, port, ranks_of_host, log);
}

// The connections of this process whose loss TCP notices in half a minute although bytes are unacknowledged, and the others.
struct Connections {
  std::size_t limited = 0;
  std::size_t others = 0;
};

Connections connections_of_process() {
  Connections count;
  for (int descriptor = 0; descriptor < 1024; ++descriptor) {
    sockaddr_in peer{};
    socklen_t bytes = sizeof peer;
    const bool is_connected = ::getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0;
    if (!is_connected || peer.sin_family != AF_INET) continue;
    int limit = 0;
    bytes = sizeof limit;
    ::getsockopt(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, &bytes);
    ++(limit == 30'000 ? count.limited : count.others);
  }
  return count;
}

}  // namespace

TEST_CASE("a name of rank 0 that appears late is looked up again, by rank 0 too") {
  const std::uint16_t port = unused_port();
  Processes ranks(2, [&](std::size_t rank) {
    host_names()[name_of_rank_0] = {.addresses = {"127.0.0.1"}, .failures = 3};
    join_by_name(rank, port, 2);
  });
  CHECK(ranks.failures() == Failures(2));
}

TEST_CASE("rank 0 listens at an address that its machine has, of those of its name") {
  const std::uint16_t port = unused_port();
  Processes ranks(2, [&](std::size_t rank) {
    host_names()[name_of_rank_0] = {.addresses = {"203.0.113.1", "127.0.0.1"}};
    if (rank == 1) host_names()[name_of_rank_0].addresses.erase(host_names()[name_of_rank_0].addresses.begin());
    join_by_name(rank, port, 2);
  });
  CHECK(ranks.failures() == Failures(2));
}

TEST_CASE("rank 0 listens at all addresses of its name, of both versions of IP") {
  for (const char* other : {"127.0.0.2", "::1"}) {
    if (!has_address(other)) continue;
    const std::uint16_t port = unused_port();
    Processes ranks(2, [&](std::size_t rank) {
      host_names()[name_of_rank_0] = {.addresses = {other}};
      if (rank == 0) host_names()[name_of_rank_0] = {.addresses = {"127.0.0.1", other}};
      join_by_name(rank, port, 2);
    });
    CHECK(ranks.failures() == Failures(2));
  }
}

TEST_CASE("each address of a name has one socket, and those that other machines reach come first") {
  host_names()["twice.test"] = {.addresses = {"127.0.0.1", "127.0.0.2", "127.0.0.1"}};
  const std::uint16_t port = unused_port();
  CHECK(listen_at_all({"twice.test", port}).size() == 2);
  const std::vector<Descriptor> at_free_port = listen_at_all({"twice.test", 0});
  CHECK(at_free_port.size() == 2);
  CHECK(local_endpoint(at_free_port.front()).port == local_endpoint(at_free_port.back()).port);
  for (const std::uint16_t wanted : {port, std::uint16_t{0}}) {
    const std::vector<Descriptor> everywhere = listen_everywhere(wanted);
    CHECK(everywhere.size() == (has_address("::1") ? 2 : 1));
    CHECK(local_endpoint(everywhere.front()).port == local_endpoint(everywhere.back()).port);
  }
  const Descriptor in_use = listen_at({"127.0.0.2", port});
  CHECK_THROWS_WITH(listen_at_all({"twice.test", port}), Catch::Contains("B3303") && Catch::Contains("in use"));
  const std::string outward = outward_address();
  if (!outward.empty()) {
    host_names()["outward.test"] = {.addresses = {"127.0.0.1", outward}};
    const std::vector<Descriptor> sockets = listen_at_all({"outward.test", unused_port()});
    REQUIRE(sockets.size() == 2);
    CHECK(local_endpoint(sockets.front()).host == outward);
  }
  host_names().clear();
}

TEST_CASE("rank 0 warns that any process can join if one of its addresses is not loopback") {
  const std::string outward = outward_address();
  if (outward.empty()) return skip("this machine has no address but loopback");
  const std::uint16_t port = unused_port();
  Processes ranks(2, [&](std::size_t rank) {
    host_names()[name_of_rank_0] = {.addresses = {"127.0.0.1", outward}};
    std::string warning;
    Log log([&](Level level, std::string_view line) {
      if (level == Level::warning) warning += line;
    });
    join_by_name(rank, port, 2, log);
    expect(rank != 0 || warning.find("any process that can reach rank 0") != std::string::npos, "no warning");
  });
  CHECK(ranks.failures() == Failures(2));
}

TEST_CASE("if rank 0's own name leads to loopback, other hosts reach it, and it warns that any process can join") {
  const std::string outward = outward_address();
  if (outward.empty()) return skip("this machine has no address but loopback");
  for (const std::string& by_rank_1 : {std::string("127.0.1.1"), outward}) {  // rank 1 is on rank 0's machine, or not
    const std::uint16_t port = unused_port();
    Processes ranks(2, [&](std::size_t rank) {
      host_names()[name_of_rank_0] = {.addresses = {rank == 0 ? "127.0.1.1" : by_rank_1}};
      std::string warning;
      Log log([&](Level level, std::string_view line) {
        if (level == Level::warning) warning += line;
      });
      join_by_name(rank, port, 1, log);
      expect(rank != 0 || warning.find("any process that can reach rank 0") != std::string::npos, "no warning");
    });
    CHECK(ranks.failures() == Failures(2));
  }
}

TEST_CASE("if all ranks are on one machine, rank 0 stays on loopback") {
  const std::uint16_t port = unused_port();
  Processes ranks(2, [&](std::size_t rank) {
    host_names()[name_of_rank_0] = {.addresses = {"127.0.1.1"}};
    std::string warning;
    Log log([&](Level level, std::string_view line) {
      if (level == Level::warning) warning += line;
    });
    join_by_name(rank, port, 2, log);
    expect(warning.empty(), warning);
  });
  CHECK(ranks.failures() == Failures(2));
}

TEST_CASE("only a name that leads to loopback alone is this machine's own") {
  host_names()["own.test"] = {.addresses = {"127.0.1.1", "::1"}};
  host_names()["both.test"] = {.addresses = {"127.0.1.1", "203.0.113.1"}};
  host_names()["late.test"] = {.addresses = {"127.0.1.1"}, .failures = 1};
  CHECK(is_own_name("own.test"));
  for (const char* host : {"both.test", "late.test", "localhost", "127.0.0.1", "127.0.1.1", "::1", "203.0.113.1"}) {
    INFO(host);
    CHECK_FALSE(is_own_name(host));
  }
  host_names().clear();
}

TEST_CASE("a machine that vanishes while bytes to it are unacknowledged is noticed on connections to the hub alone") {
  if (process_kinds().size() < 2) return skip("there is no Gloo");
  const ProcessGroupRig rig(2, HostTransport::gloo, patient);
  Processes ranks(2, [&](std::size_t number) {
    rig.as_rank(number, [](Communicator& all) {
      all.barrier();
      const Connections count = connections_of_process();
      expect(count.limited == (all.rank() == 0 ? 3u : 1u), "connections to the hub: " + std::to_string(count.limited));
      expect(count.others == 1, "connections of Gloo: " + std::to_string(count.others));
      all.barrier();
    });
  });
  CHECK(ranks.failures() == Failures(2));
}

TEST_CASE("no process connects to itself where nothing listens") {
  // Calls get the free ports of one parity in turn, in steps of random length, and listeners those of the other. So nearly every
  // run of this many calls has one from the port to itself.
  constexpr int calls = 40'000;
  const std::string outward = outward_address();
  if (outward.empty()) return skip("this machine has no address but loopback");
  const auto port = static_cast<std::uint16_t>(unused_port() ^ 1U);
  Attempt attempt;
  for (int i = 0; i < calls && !attempt.socket; ++i) {
    attempt = try_connect({outward, port}, moment);
  }
  CHECK((!attempt.socket || other_end(attempt.socket) != text(local_endpoint(attempt.socket))));
}

TEST_CASE("signals do not end an attempt to connect") {
  struct sigaction on_alarm {};
  on_alarm.sa_handler = [](int) {};  // SA_RESTART is not set: calls return with EINTR
  struct sigaction before {};
  ::sigaction(SIGALRM, &on_alarm, &before);
  const Descriptor listener = listen_at({"127.0.0.1", 0});
  ::listen(listener.get(), 0);
  const Endpoint here = local_endpoint(listener);
  std::list<Descriptor> waiting;
  for (Attempt call = try_connect(here, moment); call.socket; call = try_connect(here, moment)) {
    waiting.push_back(std::move(call.socket));
    REQUIRE(waiting.size() < 100);
  }
  std::thread accepting([&] {
    sigset_t alarms;
    ::sigemptyset(&alarms);
    ::sigaddset(&alarms, SIGALRM);
    ::pthread_sigmask(SIG_BLOCK, &alarms, nullptr);
    std::this_thread::sleep_for(moment);
    while (Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC))) {
    }
  });
  const itimerval often{.it_interval = {0, 20'000}, .it_value = {0, 20'000}};
  ::setitimer(ITIMER_REAL, &often, nullptr);
  const Attempt attempt = try_connect(here, std::chrono::seconds(5));
  const itimerval never{};
  ::setitimer(ITIMER_REAL, &never, nullptr);
  accepting.join();
  ::sigaction(SIGALRM, &before, nullptr);
  CHECK(attempt.failure.empty());
  CHECK(attempt.socket);
}

// A rank hangs up when too many processes call.
TEST_CASE("a rank that another one hangs up on calls it again") {
  const TemporaryDirectory folder;
  Processes ranks(2, [&](std::size_t rank) {
    FileStore store(folder.path());
    const auto job = std::make_shared<Job>(
        JobOptions{.launch = {.rank = rank, .size = 2, .job = "job"}, .store = &store, .timeout = patient});
    ProcessGroup group(job, rank);
    if (rank == 1) return static_cast<void>(connect_links(group));
    const Secret secret = job->secret_of_links();
    const Descriptor listener = listen_at({"127.0.0.1", 0});
    Admission admission(listener, {.name = "links of group all", .secret = secret, .expected = 2});
    group.exchange_strings("links", std::to_string(local_endpoint(listener).port) + " 127.0.0.1");
    Descriptor first;
    while (!first) {
      first = Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    }
    first = Descriptor();
    std::vector<Arrival> arrived;
    while (arrived.empty()) {
      arrived = admission.serve();
      job->error().check();
    }
    arrived.front().connection->post(arrived.front().handshake.welcome({}, secret));
    group.exchange_strings("linked", "");
  });
  CHECK(ranks.failures() == Failures(2));
}

// Tests of processes at the port of a job that do not belong to it. The job goes on, or says what it refused.
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <list>
#include <set>
#include <sstream>
#include <thread>

#include "tests/comm/addresses.h"
#include "tests/comm/process_groups.h"
#include "tests/skip.h"
#include "zero/comm/admission.h"
#include "zero/comm/message.h"
#include "zero/comm/socket.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;
using Kind = Message::Kind;

namespace {

constexpr auto soon = std::chrono::milliseconds(1500);
const std::string of_launcher = "a secret of the launcher's environment";

// Connects a rank with the secret that its environment gives.
void join_job(
    std::uint16_t port, std::size_t rank, std::size_t size, const std::string& words,
    const RankBody& body = [](Communicator& ranks) { ranks.barrier(); }, std::chrono::milliseconds timeout = patient) {
  const auto backend = kernels::cpu_backend({.threads = 1});
  MemoryAccounts accounts;
  const Environment environment([&](const std::string& name) -> std::optional<std::string> {
    if (name == "BALLAST_SECRET") return words;
    return std::nullopt;
  });
  const Launch launch{.rank = rank, .size = size, .hub = {"127.0.0.1", port}, .job = "job"};
  body(*connect({.launch = launch, .timeout = timeout},
                {.backend = *backend, .accounts = accounts, .environment = environment}));
}

Descriptor connected(std::uint16_t port) {
  Descriptor socket;
  while (!socket) {
    socket = try_connect({"127.0.0.1", port}, patient).socket;
    if (!socket) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return socket;
}

Connection call(std::uint16_t port) { return Connection(connected(port)); }

// Returns the next message of the hub; a goodbye if it ends the connection.
Message answer(Connection& connection) {
  while (true) {
    const bool is_open = connection.receive(std::chrono::seconds(20));
    if (const auto message = connection.next()) return *message;
    if (!is_open) return {.kind = Kind::goodbye};
  }
}

// The same, of a listener that this thread serves.
Message answer_of(Connection& connection, Admission& admission) {
  while (true) {
    admission.serve();
    const bool is_open = connection.receive(std::chrono::milliseconds(5));
    if (const auto message = connection.next()) return *message;
    if (!is_open) return {.kind = Kind::goodbye};
  }
}

void send_bytes(const Connection& connection, const std::string& bytes) {
  [[maybe_unused]] const ssize_t sent =
      ::send(connection.socket().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Ends a connection without the usual goodbye of TCP.
void reset(const Descriptor& socket) {
  const linger at_once{1, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
}

std::set<std::string> sockets_of(pid_t process) {
  std::set<std::string> names;
  std::error_code ended;  // the process, or one of its descriptors
  for (const auto& descriptor :
       std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/fd", ended)) {
    names.insert(std::filesystem::read_symlink(descriptor, ended).string());
  }
  return names;
}

// The ports of loopback at which a process listens. Other tests listen at the same time.
std::set<std::uint16_t> listening_ports(pid_t process) {
  const std::set<std::string> sockets = sockets_of(process);
  std::set<std::uint16_t> ports;
  std::ifstream table("/proc/net/tcp");
  std::string line;
  while (std::getline(table, line)) {
    std::istringstream words(line);
    std::string number;
    std::string local;
    std::string remote;
    std::string state;
    std::string other;  // sizes, timers and the user
    std::string inode;
    words >> number >> local >> remote >> state >> other >> other >> other >> other >> other >> inode;
    if (state == "0A" && local.starts_with("0100007F:") && sockets.contains("socket:[" + inode + "]")) {
      ports.insert(static_cast<std::uint16_t>(std::stoul(local.substr(9), nullptr, 16)));
    }
  }
  return ports;
}

std::string line_of_rank(std::size_t rank, std::size_t size) { return to_line(this_process(rank, size)); }

// Runs a job of two ranks, whose second one comes when `attack` has ended, and returns the failures of both.
Failures run_during(const std::string& words, const std::function<void(std::uint16_t port)>& attack) {
  const std::uint16_t port = unused_port();
  Processes first(1, [&](std::size_t) { join_job(port, 0, 2, words); });
  attack(port);
  Processes second(1, [&](std::size_t) { join_job(port, 1, 2, words); });
  return {first.failure(0), second.failure(0)};
}

}  // namespace

TEST_CASE("strangers that send garbage, and that hang up at once, do not disturb a job") {
  CHECK(run_during(of_launcher, [](std::uint16_t port) {
          for (int i = 0; i < 20; ++i) {
            const Connection garbage = call(port);
            send_bytes(garbage, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
            reset(connected(port));
          }
        }) == Failures(2));
}

TEST_CASE("300 strangers with half a message, who never read, keep no rank out") {
  std::list<Connection> strangers;
  CHECK(run_during(of_launcher, [&](std::uint16_t port) {
          for (int i = 0; i < 300; ++i) {
            const std::size_t bytes = i % 2 == 0 ? max_hello_bytes : max_message_bytes;
            const std::string whole = to_wire({Kind::hello, "job", std::string(bytes, 'x')});
            strangers.emplace_back(connected(port));
            send_bytes(strangers.back(), whole.substr(0, whole.size() / 2));
          }
        }) == Failures(2));
  for (Connection& each : strangers) {
    CHECK((answer(each).kind == Kind::goodbye ||
           answer(each).kind == Kind::goodbye));  // no more than a challenge comes before it
  }
}

TEST_CASE("if too many strangers hold connections open, the oldest ones end") {
  const Descriptor listener = listen_at({"127.0.0.1", 0});
  const std::uint16_t port = local_endpoint(listener).port;
  constexpr std::size_t allowed = 2 + 64;
  Admission admission(listener, {.name = "job", .expected = 2, .patience = std::chrono::hours(1)});
  std::list<Connection> strangers;
  for (std::size_t i = 0; i < allowed + 20; ++i) {
    strangers.emplace_back(connected(port));
    REQUIRE(answer_of(strangers.back(), admission).kind == Kind::challenge);
  }
  std::size_t ended = 0;
  for (Connection& each : strangers) {
    if (!each.receive(std::chrono::milliseconds(0))) ++ended;
  }
  CHECK(ended == 20);
  CHECK_FALSE(strangers.front().receive(std::chrono::milliseconds(0)));
  CHECK(strangers.back().receive(std::chrono::milliseconds(0)));
}

TEST_CASE("a stranger that says nothing has a time to do so") {
  const Descriptor listener = listen_at({"127.0.0.1", 0});
  Admission admission(listener, {.name = "job", .patience = std::chrono::milliseconds(1)});
  Connection stranger(connected(local_endpoint(listener).port));
  CHECK(answer_of(stranger, admission).kind == Kind::challenge);
  CHECK(answer_of(stranger, admission).kind == Kind::goodbye);
}

TEST_CASE("a message waits for no reader: it is kept, and sent when the other end reads") {
  const Descriptor listener = listen_at({"127.0.0.1", 0});
  Connection reader(connected(local_endpoint(listener).port));
  Connection writer(Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  const Message large{Kind::shared, "key", std::string(1 << 20, 'v')};
  std::size_t posted = 0;
  for (; !writer.is_stuck() && posted < 200; ++posted) {
    writer.post(large);
  }
  CHECK(posted < 100);  // the system takes a few MiB, and the connection keeps 64
  for (std::size_t received = 0; received < posted;) {
    writer.flush();
    if (!reader.receive(std::chrono::milliseconds(100))) break;
    while (const auto message = reader.next()) {
      CHECK(*message == large);
      ++received;
    }
  }
  CHECK_FALSE(writer.has_unsent());
}

TEST_CASE("a connection knows whether the other end's system has all bytes") {
  const Descriptor listener = listen_at({"127.0.0.1", 0});
  const Connection reader(connected(local_endpoint(listener).port));
  Connection writer(Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  writer.post({Kind::shared, "key", "a reason"});
  while (!writer.has_arrived()) {  // the reader never receives
    std::this_thread::yield();
  }
  const Message large{Kind::shared, "key", std::string(1 << 20, 'v')};
  while (!writer.has_unsent()) {
    writer.post(large);
  }
  CHECK_FALSE(writer.has_arrived());
}

TEST_CASE("a process without the secret is refused, and its messages change nothing") {
  CHECK(run_during(of_launcher, [](std::uint16_t port) {
          for (const std::string& words : {std::string(), std::string("another secret of 16 letters")}) {
            Connection stranger = call(port);
            Handshake handshake;
            const Message challenge = answer(stranger);
            REQUIRE(challenge.kind == Kind::challenge);
            stranger.send({.kind = Kind::failed, .value = "stop"});  // the hello has not been sent yet
            Connection other = call(port);
            other.send(handshake.answer(answer(other), {Kind::hello, "job", line_of_rank(1, 2)}, Secret(words)));
            const Message refused = answer(other);
            CHECK(refused.kind == Kind::refused);
            CHECK_THAT(refused.value, Contains("does not know the secret") && Contains("BALLAST_SECRET"));
          }
        }) == Failures(2));
}

TEST_CASE("a hello that another connection has sent is of no use") {
  CHECK(run_during(of_launcher, [](std::uint16_t port) {
          Connection genuine = call(port);
          Handshake handshake;
          const Message hello =
              handshake.answer(answer(genuine), {Kind::hello, "job", line_of_rank(1, 2)}, Secret(of_launcher));
          Connection replay = call(port);
          CHECK(answer(replay).kind == Kind::challenge);
          replay.send(hello);  // `genuine` has not sent it: as if it were recorded on the way
          CHECK(answer(replay).kind == Kind::refused);
        }) == Failures(2));
}

TEST_CASE("rank 0 names processes that it refused if ranks are missing") {
  const std::uint16_t port = unused_port();
  Processes ranks(2, [&](std::size_t rank) {
    join_job(port, rank, 2, rank == 0 ? of_launcher : "another secret of 16 letters", {}, soon);
  });
  CHECK_THAT(ranks.failure(1), Contains("B3303") && Contains("does not know the secret"));
  CHECK_THAT(ranks.failure(0), Contains("B3303") && Contains("rank 1 did not connect") &&
                                   Contains("a process at 127.0.0.1") && Contains("does not know the secret"));
}

TEST_CASE("strangers that hang up at once do not disturb ranks that connect with each other through Gloo") {
  if (process_kinds().size() < 2) return skip("there is no Gloo");
  const ProcessGroupRig rig(2, HostTransport::gloo, patient);
  Processes ranks(2, [&](std::size_t number) {
    rig.as_rank(number, [](Communicator& all) {
      if (all.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));  // rank 0 listens meanwhile
      all.split(0)->barrier();
    });
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  std::size_t strangers = 0;
  while (std::chrono::steady_clock::now() < end) {
    for (const std::uint16_t port : listening_ports(ranks.process(0))) {
      reset(try_connect({"127.0.0.1", port}, soon).socket);
      ++strangers;
    }
  }
  CHECK(strangers > 0);
  CHECK(ranks.failures() == Failures(2));
}

TEST_CASE("a rank does not join a process at the port of rank 0 that does not know the secret") {
  const Descriptor listener = listen_at({"127.0.0.1", 0});
  const std::uint16_t port = local_endpoint(listener).port;
  Processes rank(1, [&](std::size_t) { join_job(port, 1, 2, of_launcher); });
  Descriptor socket;
  while (!socket) {
    socket = Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }
  Connection impostor(std::move(socket));
  const Handshake handshake;
  impostor.send(handshake.challenge());
  CHECK(answer(impostor).kind == Kind::hello);
  impostor.send({Kind::welcome, std::string(proof_bytes, 'x'), line_of_rank(0, 2) + "\n" + line_of_rank(1, 2)});
  CHECK_THAT(rank.failure(0), Contains("B3303") && Contains("does not know the secret of the job"));
}

TEST_CASE("a member's malformed message ends its job with its name, and not rank 0's process") {
  for (const Message& malformed :
       {Message{Kind::late, "", "zz"}, Message{Kind::late, "", "7"}, Message{Kind::waits, "", "zz"},
        Message{Kind::share, "x", "zz"}, Message{Kind::failed, "9", "reason"}, Message{Kind::welcome, "", ""}}) {
    const std::uint16_t port = unused_port();
    Processes first(
        1, [&](std::size_t) { join_job(port, 0, 2, of_launcher, [](Communicator& ranks) { ranks.barrier(); }); });
    Connection member = call(port);
    Handshake handshake;
    member.send(handshake.answer(answer(member), {Kind::hello, "job", line_of_rank(1, 2)}, Secret(of_launcher)));
    const Message welcome = answer(member);
    CHECK(welcome.kind == Kind::welcome);
    CHECK(handshake.proves(welcome, Secret(of_launcher)));
    member.send(malformed);
    CHECK_THAT(first.failure(0), Contains("B3301") && Contains("rank 1") && Contains("died"));
  }
}

TEST_CASE("without a secret, a process of another user does not join over loopback") {
  if (::geteuid() != 0) return skip("becoming another user needs root");
  CHECK(run_during("", [](std::uint16_t port) {
          Processes other(1, [&](std::size_t) {
            if (::setuid(1234) != 0) throw std::runtime_error("no other user");
            Connection stranger = call(port);
            Handshake handshake;
            stranger.send(handshake.answer(answer(stranger), {Kind::hello, "job", line_of_rank(1, 2)}, Secret()));
            throw std::runtime_error(answer(stranger).value);
          });
          CHECK_THAT(other.failure(0), Contains("another user"));
        }) == Failures(2));
  const std::uint16_t port = unused_port();
  Processes hub_of_other(1, [&](std::size_t) {
    if (::setuid(1234) != 0) throw std::runtime_error("no other user");
    join_job(port, 0, 2, "", {}, soon);
  });
  Processes rank(1, [&](std::size_t) { join_job(port, 1, 2, "", {}, soon); });
  CHECK_THAT(rank.failure(0), Contains("B3303") && Contains("belongs to another user"));
}

TEST_CASE("the kernel's table names the user of a connected socket, and of no other") {
  const std::string table =
      "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
      "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 121973 1 0 100 0 0 10 0\n"
      "   1: 0100007F:C350 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 121974 1 0 20 4 30 10 -1\n"
      "   2: 0100007F:C351 0100007F:1F90 05 00000000:00000000 00:00000000 00000000     0        0 0 1 0 20 4 30 10 -1\n";
  CHECK(owner_in(table, "0100007F:C350", "0100007F:1F90") == 1000);
  CHECK(owner_in(table, "0100007F:C351", "0100007F:1F90") ==
        std::nullopt);  // closed: the kernel has forgotten its user
  CHECK(owner_in(table, "0100007F:1F90", "0100007F:C350") == std::nullopt);
  CHECK(owner_in("", "0100007F:C350", "0100007F:1F90") == std::nullopt);
}

TEST_CASE("a secret that can be guessed is refused") {
  CHECK_THROWS_WITH(join_job(1, 0, 2, "short"), Contains("B1006") && Contains("BALLAST_SECRET"));
}

TEST_CASE("a secret proves a statement, and no other one") {
  const Secret mine("of this job");
  const std::string proof = mine.proof("statement");
  CHECK(mine.proves(proof, "statement"));
  CHECK(Secret("of this job").proves(proof, "statement"));
  CHECK_FALSE(mine.proves(proof, "another"));
  CHECK_FALSE(mine.proves(proof.substr(1), "statement"));
  CHECK_FALSE(mine.proves("", "statement"));
  CHECK_FALSE(Secret("of another job").proves(proof, "statement"));
  CHECK(random_secret().size() == 64);
  CHECK(random_secret() != random_secret());
}

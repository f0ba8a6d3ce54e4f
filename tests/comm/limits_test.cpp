// Tests of ranks that get too few threads or descriptors: the error names the limit, and no rank waits forever.
#include <catch2/catch.hpp>

#include "tests/comm/process_groups.h"
#include "tests/limited_child.h"
#include "tests/skip.h"
#include "zero/comm/socket.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

constexpr std::size_t enough = 100;

// Connects two ranks, one of which may have only so many more of a resource, and returns the errors of both.
Failures connect_with_limit(std::size_t limited, HostTransport transport, const std::function<void()>& allow) {
  const std::uint16_t port = local_endpoint(listen_at({"127.0.0.1", 0})).port;
  Processes processes(2, [&](std::size_t rank) {
    ::alarm(hangs_after_seconds);
    if (rank == limited) allow();
    const auto backend = kernels::cpu_backend({.threads = 1});
    MemoryAccounts accounts;
    const Launch launch{.rank = rank, .size = 2, .hub = {"127.0.0.1", port}, .job = "job"};
    // Ranks of two users, one of which has so few threads, need a secret.
    const Environment environment([](const std::string& name) -> std::optional<std::string> {
      return name == "BALLAST_SECRET" ? std::optional<std::string>("a secret of both users") : std::nullopt;
    });
    const auto ranks = connect({.launch = launch, .timeout = patient, .transport = transport},
                               {.backend = *backend, .accounts = accounts, .environment = environment});
    ranks->split(0)->barrier();
  });
  Failures failures(2);
  failures[limited] = processes.failure(limited);
  // A rank that fails before it can tell the others leaves them waiting until the timeout.
  const bool told = failures[limited].empty() || failures[limited].find("cannot take more than 1") != std::string::npos;
  if (told) failures[1 - limited] = processes.failure(1 - limited);
  return failures;
}

void check_every_limit_of(std::size_t limited, HostTransport transport,
                          const std::function<void(std::size_t more)>& allow, const std::string& limit) {
  for (std::size_t more = 0; more < enough; ++more) {
    const Failures failures = connect_with_limit(limited, transport, [&] { allow(more); });
    CAPTURE(limited, static_cast<int>(transport), more, failures);
    if (failures == Failures(2)) {
      CHECK(more > 0);
      return;
    }
    REQUIRE_THAT(failures[limited], Contains(limit) && (Contains("B2401") || Contains("rank 0 cannot accept")));
    if (!failures[1 - limited].empty()) CHECK_THAT(failures[1 - limited], Contains(limit));
  }
  FAIL("it never works");
}

}  // namespace

TEST_CASE("a limit on the size of files is named where ranks share memory") {
  const Failures failures =
      connect_with_limit(1, HostTransport::fastest, [] { set_limit(RLIMIT_FSIZE, rlim_t{1} << 16); });
  CHECK_THAT(failures[1], Contains("B2401") && Contains("cannot make shared memory of") && Contains("ulimit -f"));
}

TEST_CASE("ranks share memory where no pages of files can be allocated") {
  const int error = GENERATE(EOPNOTSUPP, EPERM, ENOSYS);
  CHECK(connect_with_limit(1, HostTransport::shared_memory, [&] { forbid(SYS_fallocate, error); }) == Failures(2));
}

TEST_CASE("a rank that gets too few threads names the limit that is reached") {
  if (::geteuid() != 0) return skip("becoming another user needs root");
  if (process_kinds().size() < 2) return skip("processes of two users share no memory, and there is no Gloo");
  for (const std::size_t limited : {0u, 1u}) {
    check_every_limit_of(limited, HostTransport::gloo, allow_threads, "RLIMIT_NPROC");
  }
}

TEST_CASE("a rank that gets too few descriptors names the limit, and rank 0 tells the other ranks") {
  if (!descriptors_can_be_refused) return skip(no_refused_descriptors);
  for (const ProcessKind& kind : process_kinds()) {
    for (const std::size_t limited : {0u, 1u}) {
      check_every_limit_of(limited, kind.transport, allow_descriptors, "RLIMIT_NOFILE");
    }
  }
}

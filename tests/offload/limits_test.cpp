// What a machine or a container forbids, forbidden for real in a process of its own.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <cstddef>
#include <fstream>

#include "kernels/runtime/error.h"
#include "offload/io_queue.h"
#include "offload/run_directory.h"
#include "tests/offload/aligned.h"
#include "tests/skip.h"
#include "tests/temporary_directory.h"

using namespace ballast;
using namespace ballast::offload;

namespace {

// Runs in a child; what it returns comes back. Nothing here has threads at that moment.
std::string in_a_child(std::string (*body)()) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::string said;
    try {
      said = body();
    } catch (const std::exception& error) {
      said = error.what();
    }
    const bool told = ::write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size());
    ::_exit(told ? 0 : 1);
  }
  ::close(ends[1]);
  std::string said;
  char byte = 0;
  while (::read(ends[0], &byte, 1) == 1) {
    said += byte;
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
  return said;
}

bool has_uring() {
  try {
    uring_queue();
    return true;
  } catch (const ResourceError&) {
    return false;
  }
}

// As containers do it: the call is refused with this error.
void forbid(unsigned call, unsigned error) {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(rules), rules};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    throw std::runtime_error("seccomp is not there");
  }
}

}  // namespace

TEST_CASE("where io_uring is forbidden the threads take over, work, and it is said once") {
  const std::string said = in_a_child([]() -> std::string {
    forbid(SYS_io_uring_setup, EPERM);
    std::string lines;
    Log log([&](Level, std::string_view line) { lines.append(line).append("\n"); });
    const TemporaryDirectory directory;
    const File file(directory.path() / "file", {.create = true});
    const Aligned memory(block_bytes);
    for (int time = 0; time < 2; ++time) {
      const auto queue = open_queue({.depth = 2, .log = &log});
      queue->submit({IoKind::write, &file, 0, memory.span()}).wait();
      queue->submit({IoKind::read, &file, 0, memory.span()}).wait();
      lines.append(queue->kind()).append("\n");
    }
    return lines;
  });
  if (said.find("seccomp is not there") != std::string::npos) return skip(said);
  CHECK(said ==
        "no io_uring (Operation not permitted); threads read and write instead, as fast but for more CPU time\n"
        "threads\nthreads\n");
}

TEST_CASE("where io_uring is forbidden and asked for by name, the error says so") {
  const std::string said = in_a_child([]() -> std::string {
    forbid(SYS_io_uring_setup, EPERM);
    uring_queue();
    return "made";
  });
  if (said.find("seccomp is not there") != std::string::npos) return skip(said);
  CHECK_THAT(said, Catch::Contains("B2201") && Catch::Contains("Operation not permitted"));
}

TEST_CASE("memory that may not be registered is used unregistered, and it is said once") {
  if (!has_uring()) return skip("no io_uring here");
  if (::geteuid() != 0) return skip("becoming another user needs root");
  const std::string said = in_a_child([]() -> std::string {
    const rlimit low{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_MEMLOCK, &low);
    if (::setuid(65534) != 0) throw std::runtime_error("no other user");
    const TemporaryDirectory directory;
    const File file(directory.path() / "file", {.create = true});
    std::string lines;
    Log log([&](Level, std::string_view line) { lines.append(line).append("\n"); });
    const Aligned memory(64 << 20);
    const auto queue = uring_queue({.depth = 2, .log = &log});
    for (int time = 0; time < 2; ++time) {
      queue->remember(memory.span());
      queue->submit({IoKind::write, &file, 0, memory.span()}).wait();
      queue->submit({IoKind::read, &file, 0, memory.span()}).wait();
      queue->forget(memory.span());
    }
    return lines + "worked";
  });
  CHECK(said ==
        "io_uring works without registered memory, for more CPU time: Cannot allocate memory for 64 MiB (ulimit -l)\n"
        "worked");
}

TEST_CASE("a file system without locks is not taken for a directory in use") {
  const std::string said = in_a_child([]() -> std::string {
    const TemporaryDirectory directory;
    forbid(SYS_flock, ENOLCK);  // as NFS answers without its lock service
    const RunDirectory run(directory.path() / "run");
    return "locked";
  });
  if (said.find("seccomp is not there") != std::string::npos) return skip(said);
  CHECK_THAT(said, Catch::StartsWith("B2205 the directory cannot be locked: No locks available"));
}

// Limits of a machine or a container, set for real in a child process.
#pragma once

#include <fcntl.h>
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
#include <filesystem>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>

#include "tests/sanitizer.h"

namespace ballast::testing {

constexpr unsigned hangs_after_seconds = 120;  // the limit only ends a child that would never end

// Runs `body` in a child, and returns what it returns or throws. This process may have no other threads at that moment.
inline std::string in_a_child(const std::function<std::string()>& body) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(hangs_after_seconds);
    std::string output;
    try {
      output = body();
    } catch (const std::exception& error) {
      output = error.what();
    }
    const bool told = ::write(ends[1], output.data(), output.size()) == static_cast<ssize_t>(output.size());
    ::_exit(told ? 0 : 1);
  }
  ::close(ends[1]);
  std::string output;
  char byte = 0;
  while (::read(ends[0], &byte, 1) == 1) {
    output += byte;
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
  return output;
}

// Filters a system call in all threads of this process from now on, as a container does.
inline void filter(long system_call, unsigned action) {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(system_call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, action),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(rules), rules};
  const bool forbidden = ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
                         ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
  if (!forbidden) throw std::runtime_error("seccomp is not there");
}

inline void forbid(long system_call, int error) {
  filter(system_call, SECCOMP_RET_ERRNO | static_cast<unsigned>(error));
}

inline rlim_t entries_of(const char* folder) {
  return static_cast<rlim_t>(
      std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator{}));
}

inline void set_limit(decltype(RLIMIT_NPROC) resource, rlim_t value) {
  rlimit limit{};
  ::getrlimit(resource, &limit);
  limit.rlim_cur = value;
  if (::setrlimit(resource, &limit) != 0) throw std::runtime_error("no limit could be set");
}

// Allows so many more threads at once from now on. Needs root: the limit counts the threads of a user, so this process
// becomes the only one of a user.
inline void allow_threads(std::size_t more) {
  const rlim_t now = entries_of("/proc/self/task");
  if (::setuid(200'000 + static_cast<uid_t>(::getpid() % 1'000'000)) != 0) throw std::runtime_error("no other user");
  ::prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);  // otherwise this process could not read its own /proc entries
  set_limit(RLIMIT_NPROC, now + more);
}

// UndefinedBehaviorSanitizer, which comes with AddressSanitizer here, reads an object through a pipe to see its type.
// Without descriptors it gets no pipe, and reports an object of another type.
inline constexpr bool descriptors_can_be_refused = !address_sanitized;
inline constexpr const char* no_refused_descriptors = "UndefinedBehaviorSanitizer needs descriptors for its own checks";

// Allows so many more open files from now on.
inline void allow_descriptors(std::size_t more) {
  rlim_t first_free = 0;
  for (std::size_t free = 0; free <= more; ++first_free) {
    if (::fcntl(static_cast<int>(first_free), F_GETFD) < 0 && errno == EBADF) ++free;
  }
  set_limit(RLIMIT_NOFILE, first_free - 1);
}

// Runs `body` in a child that may have none more of a resource, then one, then two, until `body` works. Every run
// before that must end with an error that names the limit, and leave no descriptor behind.
inline void check_every_limit(const std::function<void(std::size_t more)>& allow, const std::string& limit,
                              const std::function<void()>& body) {
  constexpr std::size_t enough = 100;
  for (std::size_t more = 0; more < enough; ++more) {
    CAPTURE(limit, more);
    const std::string output = in_a_child([&]() -> std::string {
      const rlim_t before = entries_of("/proc/self/fd");
      allow(more);
      try {
        body();
      } catch (const std::exception& error) {
        set_limit(RLIMIT_NOFILE, 1000);
        return entries_of("/proc/self/fd") == before ? error.what() : "leaves a descriptor";
      }
      return "works";
    });
    if (output == "works") {
      CHECK(more > 0);
      return;
    }
    REQUIRE_THAT(output, Catch::Contains("B2401") && Catch::Contains(limit));
  }
  FAIL("it never works");
}

}  // namespace ballast::testing

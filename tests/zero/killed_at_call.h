// A child process that is killed at one of its calls that change files.
#pragma once

#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <functional>

namespace ballast::testing {

enum class ChildEnd { done, failed, killed, untraceable };

// Runs body() in a child, and kills it before its call number `moment` of those that change files, counted over all of its threads.
inline ChildEnd run_killed_at(std::size_t moment, const std::function<void()>& body) {
  static constexpr long changing[] = {
#ifdef SYS_mkdir
      SYS_mkdir,   SYS_rename,   SYS_unlink,    SYS_rmdir,
#endif
      SYS_mkdirat, SYS_renameat, SYS_unlinkat,  SYS_openat,        SYS_fsync,
      SYS_write,   SYS_pwrite64, SYS_ftruncate, SYS_io_uring_enter};
  const pid_t child = ::fork();
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(2);
    ::raise(SIGSTOP);
    try {
      body();
      ::_exit(0);
    } catch (...) {
      ::_exit(1);
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (!WIFSTOPPED(status)) return ChildEnd::untraceable;
  ::ptrace(PTRACE_SETOPTIONS, child, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL);
  ::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
  std::size_t seen = 0;
  while (true) {
    const pid_t thread = ::waitpid(-1, &status, __WALL);
    if (thread == child && WIFSIGNALED(status)) return ChildEnd::killed;
    if (thread == child && WIFEXITED(status)) return WEXITSTATUS(status) == 0 ? ChildEnd::done : ChildEnd::failed;
    if (!WIFSTOPPED(status)) continue;
    int signal = WSTOPSIG(status);
    if (signal == (SIGTRAP | 0x80)) {
      signal = 0;
      __ptrace_syscall_info call{};
      ::ptrace(PTRACE_GET_SYSCALL_INFO, thread, sizeof call, &call);
      const bool changes =
          call.op == PTRACE_SYSCALL_INFO_ENTRY && std::ranges::count(changing, static_cast<long>(call.entry.nr)) > 0;
      if (changes && ++seen == moment) ::kill(child, SIGKILL);
    } else if (signal == SIGTRAP || signal == SIGSTOP) {
      signal = 0;  // a new thread
    }
    ::ptrace(PTRACE_SYSCALL, thread, nullptr, signal);
  }
}

}  // namespace ballast::testing

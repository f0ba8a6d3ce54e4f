#include "tests/faults/planted.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace ballast::testing {
namespace {

void require_planted(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("cannot plant a fault: " + what);
}

// These system calls fail from now on in all threads of this process. With flags, only those calls fail whose fourth
// argument they are.
void refuse(std::initializer_list<long> calls, int error, int flags = -1) {
  std::vector<sock_filter> code;
  for (const long call : calls) {
    code.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)));
    code.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0,
                            static_cast<unsigned char>(flags < 0 ? 1 : 3)));
    if (flags >= 0) {
      code.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[3])));
      code.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(flags), 0, 1));
    }
    code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)));
  }
  code.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(code.size()), code.data()};
  require_planted(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "new privileges cannot be refused");
  require_planted(::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0,
                  "the kernel takes no filter of system calls");
}

void limit(decltype(RLIMIT_AS) what, rlim_t value) {
  rlimit both{};
  ::getrlimit(what, &both);
  both.rlim_cur = value;
  require_planted(::setrlimit(what, &both) == 0, "a limit cannot be set");
}

void allow_no_memory() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  limit(RLIMIT_AS, pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)));
}

// The limit is not below the open descriptors: poll() refuses to wait for more than the limit.
void allow_no_descriptors() {
  const int lowest = ::dup(STDERR_FILENO);
  ::close(lowest);
  limit(RLIMIT_NOFILE, static_cast<rlim_t>(lowest));
}

void shut_connections() {
  for (int descriptor = 3; descriptor < 1024; ++descriptor) {
    sockaddr_in peer{};
    socklen_t bytes = sizeof(peer);
    const bool is_connected = ::getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0;
    if (is_connected && peer.sin_family == AF_INET) ::shutdown(descriptor, SHUT_RDWR);
  }
}

// All are shut at one moment: a hub that found one of them shut before the others would tell the others who is gone. A child,
// which has the same connections, shuts them while this process is stopped.
void cut_connections() {
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  require_planted(child >= 0, "no child can be made");
  if (child == 0) {
    ::kill(parent, SIGSTOP);
    ::usleep(20'000);  // the signal has reached all threads by then
    shut_connections();
    ::kill(parent, SIGCONT);
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
}

const std::map<std::string_view, std::function<void()>>& all_faults() {
  static const std::map<std::string_view, std::function<void()>> faults = {
      {"no ring", [] { refuse({SYS_io_uring_setup}, ENOSYS); }},
      {"no shared maps", [] { refuse({SYS_mmap}, EPERM, MAP_SHARED); }},
      {"kill", [] { ::raise(SIGKILL); }},
      {"stop", [] { ::kill(::getpid(), SIGSTOP); }},
      {"SIGTERM", [] { ::kill(::getpid(), SIGTERM); }},
      {"full drive",
       [] {
         refuse({SYS_pwrite64, SYS_pwritev, SYS_pwritev2}, ENOSPC);
       }},
      {"EIO",
       [] {
         refuse({SYS_pread64, SYS_pwrite64, SYS_pwritev, SYS_fdatasync, SYS_fsync}, EIO);
       }},
      {"cut link", cut_connections},
      {"no memory", allow_no_memory},
      {"thread limit",
       [] {
         refuse({SYS_clone, SYS_clone3}, EAGAIN);
       }},
      {"descriptor limit", allow_no_descriptors}};
  return faults;
}

}  // namespace

void plant(std::string_view fault) {
  const auto found = all_faults().find(fault);
  require_planted(found != all_faults().end(), "there is no " + std::string(fault));
  found->second();
}

}  // namespace ballast::testing

// Python calls this. Returns whether the fault was made.
extern "C" __attribute__((visibility("default"))) int ballast_plant(const char* fault) {
  try {
    ballast::testing::plant(fault);
    return 1;
  } catch (const std::exception& failure) {
    std::cerr << failure.what() << std::endl;
    return 0;
  }
}

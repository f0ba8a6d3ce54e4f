// A process that trains, and may be killed.
#pragma once

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

namespace ballast::testing {

class ChildProcess {
 public:
  // Begins body() in a process of its own.
  template <class Body>
  explicit ChildProcess(const Body& body) : process_(::fork()) {
    if (process_ != 0) return;
    try {
      body();
      ::_exit(0);
    } catch (...) {
      ::_exit(1);
    }
  }

  void kill() const { ::kill(process_, SIGKILL); }

  // Waits for its end, and returns whether it was killed.
  bool ends_killed() const {
    int status = 0;
    ::waitpid(process_, &status, 0);
    return WIFSIGNALED(status);
  }

 private:
  pid_t process_;
};

}  // namespace ballast::testing

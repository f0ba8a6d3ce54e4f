// Blocks SIGPIPE around calls of Gloo. A write to a closed connection raises this signal, which ends the process,
// unless the writer requests an error instead. Gloo does not.
#pragma once

#include <csignal>
#include <ctime>

namespace ballast {

// Blocks the signal in the calling thread until the end of this object, and for good in threads started meanwhile. The
// process's own signal handler does not change.
class NoSignalOfBrokenPipes {
 public:
  NoSignalOfBrokenPipes() {
    ::sigemptyset(&pipe_);
    ::sigaddset(&pipe_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoSignalOfBrokenPipes() {
    const timespec at_once{};
    if (::sigismember(&before_, SIGPIPE) == 0) {
      while (::sigtimedwait(&pipe_, nullptr, &at_once) == SIGPIPE) {
      }
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSignalOfBrokenPipes(const NoSignalOfBrokenPipes&) = delete;
  NoSignalOfBrokenPipes& operator=(const NoSignalOfBrokenPipes&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
};

}  // namespace ballast

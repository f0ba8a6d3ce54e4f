// Writing to a connection whose other end is gone raises a signal that ends the process, unless the writer asks for an
// error instead, which Gloo does not.
#pragma once

#include <csignal>
#include <ctime>

namespace ballast {

// Of the thread that makes it, and of the threads that it starts meanwhile, for good. The process's own handling stays.
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

// Runs code in a process of its own that it is expected to end.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <functional>
#include <string>

namespace emulated {

// Returns what the process wrote to its standard error, and the signal that ended it.
inline std::string last_words(const std::function<void()>& body) {
  std::array<int, 2> pipe{};
  if (::pipe(pipe.data()) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(pipe[1], 2);
    std::signal(SIGSEGV, SIG_DFL);  // the test framework's handler and a sanitizer's are removed
    body();
    ::_exit(0);
  }
  ::close(pipe[1]);
  std::string text;
  std::array<char, 4096> bytes{};
  for (ssize_t count = 0; (count = ::read(pipe[0], bytes.data(), bytes.size())) > 0;) {
    text.append(bytes.data(), static_cast<std::size_t>(count));
  }
  ::close(pipe[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  return text + (WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status)) : "");
}

}  // namespace emulated

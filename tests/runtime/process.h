// Child processes, and the memory of this process, for tests.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <string>

#include "kernels/runtime/system_files.h"

// Runs a function in a child, so that limits that it sets on itself end with it. Returns the exit status, or 128 + the
// signal.
template <class Function>
int in_child(Function&& function) {
  std::cout.flush();  // else the child would print it again
  const pid_t child = fork();
  if (child == 0) {
    int status = 99;  // it threw
    try {
      status = function();
    } catch (...) {
    }
    _exit(status);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Returns "VmRSS:" (resident) or "VmSize:" (mapped) of this process.
inline std::size_t own_bytes(const std::string& key) {
  const std::string status = ballast::read_text("/proc/self/status").value();
  return ballast::kibibytes_after(status, key).value();
}

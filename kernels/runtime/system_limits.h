// Threads and file descriptors, of which the system gives a process a limited number. Where it refuses one, the error
// (B2401) says what could not be made, and names the limits with their values.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <thread>

#include "kernels/runtime/descriptor.h"

namespace ballast {

// Starts a thread that runs `body`. `purpose` completes "cannot start a thread for ...".
std::thread start_thread(std::string_view purpose, std::function<void()> body);

// Whether a system call failed because the process or the system has too many descriptors.
bool is_descriptor_limit(int error);

// Throws B2401 for a system call that failed with `error`; `what` is a clause: "cannot make a socket".
[[noreturn]] void fail_limit(std::string_view what, int error);

// Owns the descriptor that a system call has just answered; where it answered none, throws as fail_limit().
Descriptor require_descriptor(int answer, std::string_view what);

// The limits that can stand behind the refusal, for the error: those of threads for EAGAIN, those of descriptors for EMFILE
// and ENFILE, else none. What cannot be read is left out. The rlimits are always this process's own, whatever the root.
std::string limits_behind(int error, const std::filesystem::path& root = "/");

}  // namespace ballast

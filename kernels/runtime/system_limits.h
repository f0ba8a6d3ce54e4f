// Threads and file descriptors, which the system limits. If it refuses one, B2401 names it, and the limits with their
// values.
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

// Returns whether a system call failed because the process or the system has too many descriptors.
bool is_descriptor_limit(int error);

// Throws B2401 for a system call that failed with `error`; `what` is a clause: "cannot make a socket".
[[noreturn]] void fail_limit(std::string_view what, int error);

// Returns the owner of a descriptor that a system call has just returned. If the call failed, throws as fail_limit().
Descriptor require_descriptor(int answer, std::string_view what);

// Returns the limits that can cause the error: those of threads for EAGAIN, those of descriptors for EMFILE and ENFILE,
// else none. Unreadable limits are left out. The rlimits are always those of this process, whatever the root.
std::string limits_behind(int error, const std::filesystem::path& root = "/");

}  // namespace ballast

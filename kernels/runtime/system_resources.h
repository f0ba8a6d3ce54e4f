// Threads and file descriptors: their owners, and what limits them. If the system refuses one, B2401 names it, and the limits with
// their values.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

namespace ballast {

// The owner of a file descriptor, which closes it.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }

  int get() const { return number_; }
  int release() { return std::exchange(number_, -1); }  // the caller closes it
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

// Closes a descriptor in forked children. A connection, a lock or a ring ends with the last process that has it open,
// so a child that inherits it would hide the end of its parent.
// While the object lives, children of fork() get /dev/null instead of the descriptor. Any thread may make and destroy
// objects.
class NotInChildren {
 public:
  explicit NotInChildren(int descriptor);
  ~NotInChildren();
  NotInChildren(const NotInChildren&) = delete;
  NotInChildren& operator=(const NotInChildren&) = delete;

 private:
  int descriptor_;
};

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

// Counts how often files and folders below a directory are opened.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <thread>

namespace ballast::testing {

// Counts for all threads and processes, from the constructor to count(), what lies in folders that exist when it begins. The kernel
// may count equal opens as one that follow each other at once.
class Opens {
 public:
  explicit Opens(const std::filesystem::path& directory) {
    if (events_ < 0 || end_ < 0) throw std::runtime_error("no inotify");
    watch(directory);
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory))
      if (entry.is_directory()) watch(entry.path());
    reader_ = std::thread([this] { read_events(); });
  }
  ~Opens() {
    stop();
    ::close(events_);
    ::close(end_);
  }
  Opens(const Opens&) = delete;

  std::size_t count() {
    stop();
    return count_;
  }

 private:
  void watch(const std::filesystem::path& directory) const {
    if (::inotify_add_watch(events_, directory.c_str(), IN_OPEN) < 0) throw std::runtime_error("cannot watch a folder");
  }

  void stop() {
    if (!reader_.joinable()) return;
    constexpr std::uint64_t one = 1;
    static_cast<void>(::write(end_, &one, sizeof one));
    reader_.join();
  }

  void read_events() {
    std::array<pollfd, 2> ready{{{events_, POLLIN, 0}, {end_, POLLIN, 0}}};
    do {
      ::poll(ready.data(), ready.size(), -1);
      read_those_that_are_there();
    } while (ready[1].revents == 0);
  }

  void read_those_that_are_there() {
    alignas(inotify_event) std::array<char, 65536> bytes{};
    for (ssize_t size = 0; (size = ::read(events_, bytes.data(), bytes.size())) > 0;) {
      for (ssize_t at = 0; at < size;) {
        inotify_event event{};
        std::memcpy(&event, bytes.data() + at, sizeof event);
        at += static_cast<ssize_t>(sizeof event + event.len);
        const bool is_folder_twice = (event.mask & IN_ISDIR) != 0 && event.len > 0;  // its own watch counts it, too
        if (!is_folder_twice) ++count_;
      }
    }
  }

  int events_ = ::inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
  int end_ = ::eventfd(0, EFD_CLOEXEC);
  std::size_t count_ = 0;
  std::thread reader_{};
};

}  // namespace ballast::testing

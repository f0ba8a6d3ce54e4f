#include "kernels/runtime/populate.h"

#include <ballast/error.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <thread>

#include "kernels/runtime/cores.h"
#include "kernels/runtime/system_limits.h"

namespace ballast {
namespace {

constexpr std::size_t slice_bytes = std::size_t{32} << 20;  // whole huge pages, and some milliseconds of work
constexpr std::size_t most_threads = 16;  // reach the memory's speed; the ranks of a machine do this at the same time

std::size_t threads_for(std::size_t slices, int threads) {
  if (slices <= 1) return 1;
  const std::size_t wanted = threads > 0 ? static_cast<std::size_t>(threads) : usable_cores();
  return std::min({wanted, most_threads, slices});
}

// Whether kernels before 5.14, or a filter of system calls, have returned the error.
bool is_unavailable(int error) {
  return error == EINVAL || error == ENOSYS || error == EPERM || error == EACCES || error == EOPNOTSUPP;
}

// Returns 0, or the error.
int populate_slice(std::span<std::byte> pages) {
  if (madvise(pages.data(), pages.size(), MADV_POPULATE_WRITE) == 0) return 0;
  if (!is_unavailable(errno)) return errno;
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t offset = 0; offset < pages.size(); offset += page_bytes) {
    *const_cast<volatile std::byte*>(pages.data() + offset) = std::byte{0};
  }
  return 0;
}

// The slices that are left, and the errors of the threads that take them.
class Slices {
 public:
  explicit Slices(std::span<std::byte> pages) : pages_(pages) {}
  std::size_t count() const { return (pages_.size() + slice_bytes - 1) / slice_bytes; }
  std::vector<int> errors() { return std::move(errors_); }

  // Called by each thread. Returns when no slice is left, or after the first failure of any thread.
  void populate() {
    while (!has_failed_) {
      const std::size_t first = next_++ * slice_bytes;
      if (first >= pages_.size()) return;
      if (const int error = populate_slice(pages_.subspan(first, std::min(slice_bytes, pages_.size() - first)))) {
        has_failed_ = true;
        const std::lock_guard lock(mutex_);
        errors_.push_back(error);
      }
    }
  }

 private:
  std::span<std::byte> pages_;
  std::atomic<std::size_t> next_ = 0;
  std::atomic<bool> has_failed_ = false;
  std::mutex mutex_;
  std::vector<int> errors_;
};

}  // namespace

std::vector<int> populate(std::span<std::byte> pages, int threads) {
  Slices slices(pages);
  std::vector<std::thread> helpers;
  const std::size_t count = threads_for(slices.count(), threads) - 1;
  helpers.reserve(count);
  try {
    while (helpers.size() < count) {
      helpers.push_back(start_thread("populating host memory", [&] { slices.populate(); }));
    }
  } catch (const Error&) {  // the system allows no more threads: those that there are take all slices
  }
  slices.populate();
  std::ranges::for_each(helpers, [](std::thread& helper) { helper.join(); });
  return slices.errors();
}

}  // namespace ballast

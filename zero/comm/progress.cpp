#include "zero/comm/progress.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace ballast {
namespace {

void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) {
  ::syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

}  // namespace

// Both sides are sequentially consistent: either the sleeper sees the count, or this thread sees the sleeper.
void Progress::advance() {
  count_.fetch_add(1);
  if (sleepers_.load() > 0) futex(count_, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Progress::wait_for(std::uint32_t count, std::chrono::nanoseconds pause) {
  sleepers_.fetch_add(1);
  const std::uint32_t seen = count_.load();
  if (!has_reached(count)) {
    const timespec timeout{0, static_cast<long>(pause.count())};
    futex(count_, FUTEX_WAIT, seen, &timeout);
  }
  sleepers_.fetch_sub(1);
  return has_reached(count);
}

}  // namespace ballast

#include "kernels/runtime/time_slices.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace ballast {
namespace {

constexpr std::uint64_t shortest = 100'000;  // nanoseconds; the kernel allows no less

// The kernel's sched_attr in its first size. Headers of the kernel and of C libraries older than 2.41 define types twice.
struct Scheduling {
  std::uint32_t size = sizeof(Scheduling);
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t slice = 0;  // nanoseconds
  std::uint64_t deadline = 0;
  std::uint64_t period = 0;
};
static_assert(sizeof(Scheduling) == 48);

constexpr std::uint64_t reset_in_children = 1;  // SCHED_FLAG_RESET_ON_FORK

// Threads with another policy, such as SCHED_FIFO, keep it as it is.
void use_slices_of(std::uint64_t nanoseconds, std::uint64_t flags = 0) {
  Scheduling scheduling;
  const bool is_known = ::syscall(SYS_sched_getattr, 0, &scheduling, sizeof scheduling, 0) == 0;
  if (!is_known || scheduling.policy != SCHED_OTHER) return;
  scheduling.slice = nanoseconds;
  scheduling.flags |= flags;
  ::syscall(SYS_sched_setattr, 0, &scheduling, 0);
}

std::uint64_t slices_of_this_thread() {
  Scheduling scheduling;
  return ::syscall(SYS_sched_getattr, 0, &scheduling, sizeof scheduling, 0) == 0 ? scheduling.slice : 0;
}

}  // namespace

void use_short_time_slices() { use_slices_of(shortest, reset_in_children); }

ShortTimeSlices::ShortTimeSlices() : before_(slices_of_this_thread()) { use_slices_of(shortest); }

ShortTimeSlices::~ShortTimeSlices() { use_slices_of(before_); }

}  // namespace ballast

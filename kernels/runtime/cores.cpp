#include "kernels/runtime/cores.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "kernels/runtime/cgroup.h"

namespace ballast {

std::vector<int> allowed_cores() {
  std::array<cpu_set_t, 8> mask{};  // room for 8,192 cores
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(mask), mask.data()) == 0) {
    for (std::size_t core = 0; core < mask.size() * CPU_SETSIZE; ++core) {
      if (CPU_ISSET_S(core, sizeof(mask), mask.data())) {
        cores.push_back(static_cast<int>(core));
      }
    }
  }
  return cores;
}

std::size_t usable_cores(const std::filesystem::path& root) {
  const std::size_t allowed = std::max<std::size_t>(allowed_cores().size(), 1);
  const std::optional<double> quota = cgroup_cores(root);
  return quota ? std::clamp<std::size_t>(static_cast<std::size_t>(std::ceil(*quota)), 1, allowed) : allowed;
}

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

// The cores that this process may use, from the affinity mask and the quota. OMP_NUM_THREADS is ignored, because
// launchers set it to 1. Any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

namespace ballast {

std::vector<int> allowed_cores();  // the calling thread's affinity mask, ascending

// Returns the useful number of threads: the mask's cores, but at most the container's CPU quota, rounded up.
std::size_t usable_cores(const std::filesystem::path& root = "/");

// Gives the calling thread, which moves data, short time slices, and none to the threads that it starts, such as those that compute for all. A thread with
// short slices runs sooner after it was woken, also on a core where another thread computes, and gets no more of the core in all. So
// a link waits less for the threads that feed it. Linux has such slices since 6.12; before that, and where they are forbidden, this
// does nothing.
void use_short_time_slices();

// Short slices for the calling thread until the end of this object, and for good in threads started meanwhile.
class ShortTimeSlices {
 public:
  ShortTimeSlices();
  ~ShortTimeSlices();
  ShortTimeSlices(const ShortTimeSlices&) = delete;
  ShortTimeSlices& operator=(const ShortTimeSlices&) = delete;

 private:
  std::uint64_t before_;  // nanoseconds
};

}  // namespace ballast

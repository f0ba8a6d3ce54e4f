// Short time slices for threads that move data.
#pragma once

#include <cstdint>

namespace ballast {

// Gives the calling thread short slices, and none to the threads that it starts, such as those that compute for all. A thread with
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

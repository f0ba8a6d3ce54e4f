// The threads that the library uses: a oneTBB arena with the cores of the affinity mask.
#pragma once

#include <oneapi/tbb/task_arena.h>

#include <cstddef>
#include <functional>

namespace ballast::benchmarks {

// Cores that this process may run on; what nproc(1) says.
std::size_t available_cores();

class Threads {
 public:
  explicit Threads(std::size_t count = available_cores());
  std::size_t count() const { return count_; }

  // Calls `body(first, last)` for slices that cover 0 to `count`, one for each thread, cut at multiples of `grain`.
  void for_slices(std::size_t count, std::size_t grain, const std::function<void(std::size_t, std::size_t)>& body);

 private:
  std::size_t count_;
  tbb::task_arena arena_;
};

}  // namespace ballast::benchmarks

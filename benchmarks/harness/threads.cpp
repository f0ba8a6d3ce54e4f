#include "benchmarks/harness/threads.h"

#include <oneapi/tbb/parallel_for.h>
#include <sched.h>

#include <algorithm>
#include <thread>

namespace ballast::benchmarks {

std::size_t available_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    return std::max(1u, std::thread::hardware_concurrency());
  }
  return static_cast<std::size_t>(std::max(1, CPU_COUNT(&allowed)));
}

Threads::Threads(std::size_t count) : count_(std::max<std::size_t>(1, count)), arena_(static_cast<int>(count_)) {}

void Threads::for_slices(std::size_t count, std::size_t grain,
                         const std::function<void(std::size_t, std::size_t)>& body) {
  const std::size_t grains = (count + grain - 1) / grain;
  const auto edge = [&](std::size_t slice) { return std::min(count, grains * slice / count_ * grain); };
  const auto run = [&](std::size_t slice) { body(edge(slice), edge(slice + 1)); };
  arena_.execute([&] { tbb::parallel_for(std::size_t{0}, count_, run, tbb::static_partitioner{}); });
}

}  // namespace ballast::benchmarks

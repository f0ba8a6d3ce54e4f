#include "tests/emulated_cuda/live.h"

#include <atomic>

#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/include/nvtx3/nvToolsExt.h"
#include "tests/emulated_cuda/memory_access.h"
#include "tests/emulated_cuda/pinned_memory.h"
#include "tests/emulated_cuda/streams.h"

namespace emulated {
namespace {

std::atomic<std::size_t> profiler_ranges = 0;

}  // namespace

std::size_t live_profiler_ranges() { return profiler_ranges; }

Live live() {
  return {.device_bytes = live_device_bytes(),
          .streams = live_streams(),
          .events = live_events(),
          .pinned_ranges = live_pinned_ranges(),
          .communicators = live_communicators(),
          .cublas_handles = live_cublas_handles(),
          .profiler_ranges = live_profiler_ranges()};
}

}  // namespace emulated

int nvtxRangePushA(const char*) { return static_cast<int>(emulated::profiler_ranges++); }
int nvtxRangePop() { return static_cast<int>(--emulated::profiler_ranges); }

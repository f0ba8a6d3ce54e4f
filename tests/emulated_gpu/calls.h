// Calls of the emulated device that cost time on a real one.
#pragma once

#include <atomic>
#include <cstddef>

namespace ballast::testing {

struct DeviceCalls {
  std::atomic<std::size_t> created_events = 0;
  std::atomic<std::size_t> recorded_events = 0;
  std::atomic<std::size_t> read_times = 0;
};

inline DeviceCalls device_calls;

}  // namespace ballast::testing

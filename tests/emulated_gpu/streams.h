// Emulated streams. A stream is a thread that is late on purpose.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>

#include "kernels/runtime/device.h"
#include "zero/engine/lane_thread.h"

struct CUstream_st {
  // Runs `work` some time later, after all work added before.
  void add(std::function<void()> work) {
    const std::lock_guard lock(mutex);
    last = thread.add([work = std::move(work), late = ++added % 7] {
      if (late == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
      work();
    });
  }
  ballast::offload::Completion newest() {
    const std::lock_guard lock(mutex);
    return last;
  }

  std::mutex mutex{};
  std::size_t added = 0;
  ballast::offload::Completion last{};
  ballast::LaneThread thread{};
};

namespace ballast::testing {

CUstream_st& stream_of(StreamHandle handle);  // null is a stream too

}  // namespace ballast::testing

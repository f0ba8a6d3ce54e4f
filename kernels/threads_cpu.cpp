#include "kernels/threads.h"

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/runtime/system_resources.h"

namespace ballast::kernels {
namespace {

// Throws B2401 if the system refuses so many threads.
void require_threads(std::size_t count) {
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::vector<std::thread> threads;
  const auto end_all = [&] {
    end.set_value();
    std::ranges::for_each(threads, [](std::thread& thread) { thread.join(); });
  };
  try {
    threads.reserve(count);
    while (threads.size() < count) {
      threads.push_back(start_thread("the CPU kernels", [ended] { ended.wait(); }));
    }
  } catch (...) {
    end_all();
    throw;
  }
  end_all();
}

// TBB's threads belong to the process and stay, so only the threads beyond those already tried are tried.
void require_threads_once(std::size_t count) {
  static std::mutex mutex;
  static std::size_t tried = 0;
  const std::lock_guard lock(mutex);
  if (count <= tried) return;
  require_threads(count - tried);
  tried = count;
}

}  // namespace

struct Threads::Arena {
  explicit Arena(int count) : tbb(count) {}

  oneapi::tbb::task_arena tbb;
  std::once_flag tried{};
};

// They are not destroyed, because a lane may still work when the process ends.
Threads::Arena& Threads::arena_of(int count) {
  static std::mutex mutex;
  static auto& arenas = *new std::map<int, Arena>();
  const std::lock_guard lock(mutex);
  return arenas.try_emplace(count, count).first->second;
}

void Threads::each(std::size_t parts, const std::function<void(std::size_t)>& body) const {
  if (parts <= 1 || count_ == 1) {
    for (std::size_t i = 0; i < parts; ++i) {
      body(i);
    }
    return;
  }
  // TBB's threads start each other, and TBB ends the process if the system refuses one. So this function first starts
  // and ends as many threads itself, which can still throw an error.
  std::call_once(arena_.tried, [&] {
    using oneapi::tbb::global_control;
    const std::size_t most = global_control::active_value(global_control::max_allowed_parallelism);
    require_threads_once(std::min(static_cast<std::size_t>(count_), most) - 1);
  });
  arena_.tbb.execute([&] { oneapi::tbb::parallel_for(std::size_t{0}, parts, body); });
}

}  // namespace ballast::kernels

#include "kernels/threads.h"

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

namespace ballast::kernels {

struct Threads::Arena {
  mutable oneapi::tbb::task_arena tbb;
};

Threads::Threads(int count) : count_(count), arena_(new Arena{oneapi::tbb::task_arena(count)}) {}

Threads::~Threads() = default;

void Threads::each(std::size_t parts, const std::function<void(std::size_t)>& body) const {
  if (parts <= 1 || count_ == 1) {
    for (std::size_t i = 0; i < parts; ++i) {
      body(i);
    }
    return;
  }
  arena_->tbb.execute([&] { oneapi::tbb::parallel_for(std::size_t{0}, parts, body); });
}

}  // namespace ballast::kernels

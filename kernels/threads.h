// The threads of the CPU backend.
#pragma once

#include <cstddef>
#include <functional>

namespace ballast::kernels {

// All objects of one count share their threads. A training's backend and its communicator's take turns within a step, and TBB's
// threads need about 0.1 ms to move to other work.
class Threads {
 public:
  // The threads start at the first use, which throws B2401 if the system refuses them.
  explicit Threads(int count) : count_(count), arena_(arena_of(count)) {}
  int count() const { return count_; }

  // Calls body(i) for every i below `parts`, in any order, on several threads, and returns when all calls have
  // returned. Rethrows the first exception. Any thread may call this, also several at the same time.
  void each(std::size_t parts, const std::function<void(std::size_t)>& body) const;

 private:
  struct Arena;
  static Arena& arena_of(int count);

  int count_;
  Arena& arena_;
};

}  // namespace ballast::kernels

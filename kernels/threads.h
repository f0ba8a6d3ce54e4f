// The threads of the CPU backend.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace ballast::kernels {

class Threads {
 public:
  explicit Threads(int count);  // the threads start at the first use, which throws B2401 if the system refuses them
  ~Threads();
  int count() const { return count_; }

  // Calls body(i) for every i below `parts`, in any order, on several threads, and returns when all calls have
  // returned. Rethrows the first exception. Any thread may call this, also several at the same time.
  void each(std::size_t parts, const std::function<void(std::size_t)>& body) const;

 private:
  struct Arena;
  int count_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace ballast::kernels

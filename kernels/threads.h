// The threads of the CPU backend.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace ballast::kernels {

class Threads {
 public:
  explicit Threads(int count);  // they start when they are first needed: B2401 where the system gives no more
  ~Threads();
  int count() const { return count_; }

  // Calls body(i) for every i below `parts`, in any order, on several threads; returns when all have returned. The first
  // exception of a body is thrown again. May be called from several threads at once.
  void each(std::size_t parts, const std::function<void(std::size_t)>& body) const;

 private:
  struct Arena;
  int count_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace ballast::kernels

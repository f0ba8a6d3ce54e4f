// The current GPU of the calling thread, for direct calls of CUDA and its libraries. In builds without CUDA nothing is selected.
#pragma once

#include <new>

namespace ballast {

// Selects a GPU while the object lives, and restores the previous one if this process uses it. CUDA makes a context when
// a GPU is selected, which takes half a gigabyte of its memory, and a new thread's current GPU is 0. Used by one thread.
class CurrentGpu {
 public:
  explicit CurrentGpu(int gpu);
  CurrentGpu(int gpu, std::nothrow_t) noexcept;  // for destructors: a GPU that has failed is not selected
  ~CurrentGpu();                                 // NOLINT(performance-trivially-destructible): it is not, with CUDA
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

 private:
  void select(int gpu);

  int former_ = 0;
  bool restores_ = false;
};

}  // namespace ballast

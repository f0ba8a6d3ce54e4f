// The current GPU of the calling thread, for direct calls of CUDA and its libraries. Only in builds with CUDA.
#pragma once

namespace ballast {

// Selects a GPU while the object lives, and restores the previous one. It calls CUDA only if another GPU is current,
// because the selection takes memory on a GPU. Used by one thread.
class CurrentGpu {
 public:
  explicit CurrentGpu(int gpu);
  ~CurrentGpu();
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

 private:
  int former_ = 0;
  bool changed_ = false;
};

}  // namespace ballast

// Which GPU the calling thread's own calls of CUDA and its libraries go to. Only where CUDA is built.
#pragma once

namespace ballast {

// This one for as long as this lives, and then the one before. Nothing is asked of CUDA where it is that one already: choosing
// a GPU takes memory there.
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

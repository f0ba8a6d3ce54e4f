// The stream of a GPU that a group works on.
#pragma once

#include "kernels/runtime/device.h"

namespace ballast {

struct GpuStream {
  StreamHandle stream = nullptr;
  int gpu = 0;
};

}  // namespace ballast

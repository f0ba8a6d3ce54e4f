// Where a rank's work on a GPU goes.
#pragma once

#include "kernels/runtime/device.h"

namespace ballast {

struct GpuPlace {
  StreamHandle stream = nullptr;
  int gpu = 0;
};

}  // namespace ballast

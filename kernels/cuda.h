// What the sources of the CUDA backend share. Kernels take plain structs only: the functions of a view run on the host.
#pragma once

#include "kernels/exact_sum_math.h"
#include "kernels/numbers.h"
#include "kernels/quantize_math.h"
#include "kernels/runtime/device.h"
#include "kernels/update.h"

namespace ballast::kernels {

struct Cuda {
  StreamHandle stream = nullptr;
  int gpu = 0;
  unsigned multiprocessors = 1;
};

Cuda cuda_on(StreamHandle stream, int gpu);

void update(const Cuda& cuda, const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups);
void sum_of_squares(const Cuda& cuda, const ConstNumbers& values, ExactSum* into);

// Computes to = from / divisor(squares, bound).
void normalize(const Cuda& cuda, const ConstNumbers& from, const ExactSum* squares, const NormBound& bound,
               const Numbers& to);

}  // namespace ballast::kernels

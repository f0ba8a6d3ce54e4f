// The CUDA kernels, which backend_cuda.cpp calls after it has checked the arguments. They take plain structs only: nvcc
// does not compile views, nor the formatting library that views need.
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

struct CastTask {
  ConstNumbers from;
  Numbers to;
};

void update(const Cuda& cuda, const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups);
void cast(const Cuda& cuda, const CastTask& task);
void cast_all(const Cuda& cuda, std::span<const CastTask> tasks);
void fill(const Cuda& cuda, const Numbers& to, float value);
void accumulate(const Cuda& cuda, const ConstNumbers& from, float scale, const Numbers& into);
void sum(const Cuda& cuda, const Summands& from, const Numbers& into);
void accumulate_stochastic(const Cuda& cuda, const ConstNumbers& from, const Numbers& into, std::span<const Run> runs,
                           const RoundingPlace& place);
void sum_of_squares(const Cuda& cuda, const ConstNumbers& values, ExactSum* into);
void first_non_finite(const Cuda& cuda, const ConstNumbers& values, std::uint64_t first_index, std::uint64_t* first);
void quantize(const Cuda& cuda, const ConstNumbers& from, const QuantizedPiece& to, const CodeRounding& rounding);
void dequantize(const Cuda& cuda, const ConstQuantizedPiece& from, const Numbers& to);
void sum_quantized(const Cuda& cuda, const QuantizedSummands& from, const Numbers& into);

// Computes to = from / divisor(squares, bound).
void normalize(const Cuda& cuda, const ConstNumbers& from, const ExactSum* squares, const NormBound& bound,
               const Numbers& to);

}  // namespace ballast::kernels

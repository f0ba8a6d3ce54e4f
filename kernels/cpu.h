// The common parameters of the CPU kernels.
#pragma once

#include "kernels/copy_pieces.h"
#include "kernels/exact_sum_math.h"
#include "kernels/quantize.h"
#include "kernels/threads.h"
#include "kernels/walks.h"

namespace ballast::kernels {

struct CpuOptions;

struct Cpu {
  const Walks& walks;
  Threads threads;
};

Cpu cpu_of(const CpuOptions& options);

constexpr std::size_t arrays_in_a_pass = 32;  // of a sum; the CPU's prefetchers follow as many

void update(const Cpu& cpu, const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups);
void cast(const Cpu& cpu, const ConstView& from, const View& to);
void fill(const Cpu& cpu, const View& to, float value);
void accumulate(const Cpu& cpu, const ConstView& from, float scale, const View& into);
void sum(const Cpu& cpu, std::span<const ConstView> from, const View& into);
void accumulate_stochastic(const Cpu& cpu, const ConstView& from, const View& into, std::span<const Run> runs,
                           const RoundingPlace& place);
void sum_of_squares(const Cpu& cpu, const ConstView& values, ExactSum* into);
void first_non_finite(const Cpu& cpu, const ConstView& values, std::uint64_t first_index, std::uint64_t* first);
void copy_pieces(const Cpu& cpu, std::span<const CopyPiece> pieces);
void quantize(const Cpu& cpu, const ConstView& from, const Quantized& to, const CodeRounding& rounding);
void dequantize(const Cpu& cpu, const ConstQuantized& from, const View& to);
void sum_quantized(const Cpu& cpu, std::span<const ConstView> from, CodeBits bits, const View& into);

// A thread at a time works in each memory.
void multiply(const Cpu& cpu, const Product& product, std::span<BlockMemory> memory);

}  // namespace ballast::kernels

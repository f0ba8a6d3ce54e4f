// What the CPU's kernels share: the walks of one instruction set, threads, and the work that an orthogonalization needs as well.
#pragma once

#include "kernels/backend.h"
#include "kernels/threads.h"
#include "kernels/walks.h"

namespace ballast::kernels {

struct Cpu {
  const Walks& walks;
  Threads threads;
};

Cpu cpu_of(const CpuOptions& options);

void sum_of_squares(const Cpu& cpu, const ConstView& values, ExactSum* into);

// A thread at a time works in each memory.
void multiply(const Cpu& cpu, const Product& product, std::span<BlockMemory> memory);

}  // namespace ballast::kernels

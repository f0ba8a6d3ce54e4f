// What the CPU implementations of the kernels work with.
#pragma once

#include "kernels/threads.h"
#include "kernels/walks.h"

namespace ballast::kernels {

struct Cpu {
  const Walks& walks;
  Threads threads;
};

void update(const Cpu& cpu, const UpdateTile& tile, std::span<const Run> runs, std::span<const GroupStep> groups);

}  // namespace ballast::kernels

// The table of CPU walks: one for each instruction set, filled in by walks_scalar.cpp, walks_avx2.cpp, walks_avx512.cpp.
// A walk works on the calling thread, on one piece of memory.
#pragma once

#include "kernels/simd/isa.h"
#include "kernels/update.h"

namespace ballast::kernels {

struct Walks {
  void (*update)(const UpdateTile& tile, const GroupStep& step);
};

const Walks& walks_for(simd::Isa isa);

}  // namespace ballast::kernels

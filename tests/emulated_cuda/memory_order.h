// The order of accesses to memory. Work of two streams that accesses the same bytes, and writes them, must be ordered by a
// stream, an event, or a wait of the host between them. Clocks find a missing order in every run, whichever work comes first.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tests/emulated_cuda/clock.h"

namespace emulated {

// Bytes of a GPU, or of pinned memory, at the address that programs know.
struct Access {
  const void* memory = nullptr;
  std::size_t bytes = 0;
  bool writes = false;
};

// Checks that work which begins now follows everything that it conflicts with, and remembers it. Accesses must be noted in an
// order in which they may happen: when the stream reaches the work.
void note_accesses(const std::vector<Access>& accesses, const IssuedPtr& work);

void forget_accesses(const void* memory, std::size_t bytes);  // the memory is freed

// Says which work does what with these bytes.
std::string described(const Issued& work, const Access& access);

}  // namespace emulated

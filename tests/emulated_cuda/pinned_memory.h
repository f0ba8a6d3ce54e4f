// Host memory that is pinned.
#pragma once

#include <cstddef>
#include <utility>

#include "tests/emulated_cuda/include/cuda_runtime_api.h"

namespace emulated {

bool is_pinned(const void* address, std::size_t bytes);
// The begin and the size of the range of this process's own memory. Memory that processes share is left out: the file of a
// process's memory ignores rights of private pages alone.
std::pair<const std::byte*, std::size_t> pinned_range_around(const void* address);
bool is_being_copied(const void* address);
std::size_t live_pinned_ranges();

// Copies under way, which must end before their memory is unpinned.
void begin_copy(const void* address);
void end_copy(const void* address);

}  // namespace emulated

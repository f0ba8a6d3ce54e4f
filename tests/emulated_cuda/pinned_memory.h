// Host memory that is pinned.
#pragma once

#include <cstddef>
#include <utility>

#include "tests/emulated_cuda/include/cuda_runtime_api.h"

namespace emulated {

bool is_pinned(const void* address, std::size_t bytes);
std::pair<const std::byte*, std::size_t> pinned_range_around(const void* address);  // the range's begin and size
bool is_being_copied(const void* address);
std::size_t live_pinned_ranges();

// Copies under way, which must end before their memory is unpinned.
void begin_copy(const void* address);
void end_copy(const void* address);

}  // namespace emulated

// The parts of emulated::live().
#pragma once

#include <cstddef>

namespace emulated {

std::size_t live_events();
std::size_t live_communicators();
std::size_t live_cublas_handles();
std::size_t live_profiler_ranges();

}  // namespace emulated

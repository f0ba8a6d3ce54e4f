#pragma once

#include <cstddef>

namespace ballast::benchmarks {

// Copies without fetching the lines that it overwrites, if the processor can. `to` and `from` are aligned to 16 bytes.
void stream_copy(float* to, const float* from, std::size_t count);

}  // namespace ballast::benchmarks

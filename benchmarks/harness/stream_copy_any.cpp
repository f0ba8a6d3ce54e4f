#include <cstring>

#include "benchmarks/harness/stream_copy.h"

namespace ballast::benchmarks {

void stream_copy(float* to, const float* from, std::size_t count) { std::memcpy(to, from, count * sizeof(float)); }

}  // namespace ballast::benchmarks

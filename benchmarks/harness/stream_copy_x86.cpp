#include <xmmintrin.h>

#include "benchmarks/harness/stream_copy.h"

namespace ballast::benchmarks {

void stream_copy(float* to, const float* from, std::size_t count) {
  constexpr std::size_t line = 16;  // floats; four stores fill a write-combining buffer
  const std::size_t whole = count / line * line;
  for (std::size_t i = 0; i < whole; i += line) {
    _mm_stream_ps(to + i, _mm_load_ps(from + i));
    _mm_stream_ps(to + i + 4, _mm_load_ps(from + i + 4));
    _mm_stream_ps(to + i + 8, _mm_load_ps(from + i + 8));
    _mm_stream_ps(to + i + 12, _mm_load_ps(from + i + 12));
  }
  for (std::size_t i = whole; i < count; ++i) {
    to[i] = from[i];
  }
  _mm_sfence();
}

}  // namespace ballast::benchmarks

// Subnormal numbers on a CPU: by default slow, and exact.
#pragma once

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace ballast::kernels::simd {

// This thread takes subnormal numbers for zeros, and makes none, until this object is destroyed. Compilers move
// arithmetic across its ends, so what depends on it is in a function that is not inlined.
class SubnormalsAreZero {
 public:
#if defined(__SSE__)
  SubnormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | flush_results | ignore_arguments); }
  ~SubnormalsAreZero() { _mm_setcsr(before_); }
#else
  SubnormalsAreZero() = default;
  ~SubnormalsAreZero() {}
#endif
  SubnormalsAreZero(const SubnormalsAreZero&) = delete;

 private:
#if defined(__SSE__)
  static constexpr unsigned flush_results = 0x8000;
  static constexpr unsigned ignore_arguments = 0x0040;
  unsigned before_;
#endif
};

}  // namespace ballast::kernels::simd

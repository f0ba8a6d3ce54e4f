// Subnormal numbers on a CPU: by default exact, and on x86 slow.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace ballast::kernels::simd {

// This thread takes subnormal numbers for zeros, and makes none, until this object is destroyed. Compilers move
// arithmetic across its ends, so what depends on it is in a function that is not inlined.
//
// A result is subnormal if it is one after rounding, as x86 has it. ARM decides before rounding, and makes zeros of results that
// would round to the smallest normal number. It notes that it made a zero, so holds() tells when none can have been of these.
class SubnormalsAreZero {
 public:
#if defined(__SSE__)
  SubnormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | flush_results | ignore_arguments); }
  ~SubnormalsAreZero() { _mm_setcsr(before_); }
  static constexpr bool always_holds = true;
  bool holds() const { return true; }
#elif defined(__aarch64__)
  SubnormalsAreZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | flush) : "memory");
    asm volatile("msr fpsr, %0" ::"r"(status() & ~underflow) : "memory");
  }
  ~SubnormalsAreZero() { asm volatile("msr fpcr, %0" ::"r"(before_) : "memory"); }
  static constexpr bool always_holds = false;
  bool holds() const { return (status() & underflow) == 0; }
#else
  SubnormalsAreZero() = default;
  ~SubnormalsAreZero() {}
  static constexpr bool always_holds = false;
  bool holds() const { return false; }
#endif
  SubnormalsAreZero(const SubnormalsAreZero&) = delete;

 private:
#if defined(__SSE__)
  static constexpr unsigned flush_results = 0x8000;
  static constexpr unsigned ignore_arguments = 0x0040;
  unsigned before_;
#elif defined(__aarch64__)
  static constexpr std::uint64_t flush = 1u << 24;
  static constexpr std::uint64_t underflow = 1u << 3;
  static std::uint64_t status() {
    std::uint64_t now;
    asm volatile("mrs %0, fpsr" : "=r"(now)::"memory");
    return now;
  }
  std::uint64_t before_;
#endif
};

// Subnormal numbers stay as they are, for formulas that make zeros of them.
struct SubnormalsStay {
  static constexpr bool always_holds = true;
  bool holds() const { return true; }
};

}  // namespace ballast::kernels::simd

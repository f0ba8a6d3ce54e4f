// Reduces tests under a sanitizer, where the same program takes 5 to 20 times as long. Sanitizers check what the code
// does; the other builds check the results of every case.
#pragma once

#include <cstddef>

namespace ballast::testing {

#if defined(__SANITIZE_ADDRESS__)  // GCC
inline constexpr bool address_sanitized = true;
#elif defined(__has_feature)  // Clang
inline constexpr bool address_sanitized = __has_feature(address_sanitizer);
#else
inline constexpr bool address_sanitized = false;
#endif

#if defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#elif defined(__has_feature)
inline constexpr bool sanitized = address_sanitized || __has_feature(thread_sanitizer);
#else
inline constexpr bool sanitized = address_sanitized;
#endif

// Returns the distance between the cases to run of a sweep, which runs the same code on many values.
constexpr std::size_t every(std::size_t n) { return sanitized ? n : 1; }

// The same for cases that combine several lists. `n` is a prime that divides the length of none of them, so each
// element of each list has its turn, combined with different ones each time.
class Sweep {
 public:
  explicit Sweep(std::size_t n) : distance_(every(n)) {}

  bool takes_next() { return next_++ % distance_ == 0; }

 private:
  std::size_t distance_;
  std::size_t next_ = 0;
};

}  // namespace ballast::testing

// The baseline, and the choice. checksum_avx2.cpp says why xxHash is included in this way.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "offload/checksum.h"

namespace ballast::offload {

std::uint64_t checksum_baseline(std::span<const std::byte> bytes, std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

std::uint64_t checksum(std::span<const std::byte> bytes, std::uint64_t seed) {
#if defined(__x86_64__)
  static const auto best = __builtin_cpu_supports("avx2") ? checksum_avx2 : checksum_baseline;
  return best(bytes, seed);
#else
  return checksum_baseline(bytes, seed);
#endif
}

}  // namespace ballast::offload

// Compiled for AVX2. xxHash's functions become static in each source, so that each source has its own instructions.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "offload/checksum.h"

namespace ballast::offload {

std::uint64_t checksum_avx2(std::span<const std::byte> bytes, std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

}  // namespace ballast::offload

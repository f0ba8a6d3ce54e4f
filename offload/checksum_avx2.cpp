#include "offload/checksum_walk.h"

namespace ballast::offload {

std::uint64_t checksum_avx2(std::span<const std::byte> bytes, std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

}  // namespace ballast::offload

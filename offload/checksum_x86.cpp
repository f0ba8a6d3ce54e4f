#include "offload/checksum.h"

namespace ballast::offload {

std::uint64_t checksum(std::span<const std::byte> bytes, std::uint64_t seed) {
  static const auto best = __builtin_cpu_supports("avx2") ? checksum_avx2 : checksum_baseline;
  return best(bytes, seed);
}

}  // namespace ballast::offload

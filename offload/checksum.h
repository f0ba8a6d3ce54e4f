// XXH3-64, with the widest instructions that the processor has. All of them give the same checksums. Any thread may
// call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ballast::offload {

std::uint64_t checksum(std::span<const std::byte> bytes, std::uint64_t seed = 0);

// The implementations to choose from. The library that distributions ship has only the baseline, at a third of AVX2's
// speed.
std::uint64_t checksum_baseline(std::span<const std::byte> bytes, std::uint64_t seed);
std::uint64_t checksum_avx2(std::span<const std::byte> bytes, std::uint64_t seed);  // x86 with AVX2 only

}  // namespace ballast::offload

// The instruction sets of the CPU walks. One is chosen at run time; all give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace ballast::kernels::simd {

enum class Isa : std::uint8_t { scalar, neon, avx2, avx512 };

std::span<const Isa> usable_isas();  // instruction sets of this build and this machine, best first; never empty

inline std::string_view name(Isa isa) {
  constexpr std::string_view names[] = {"scalar", "NEON", "AVX2", "AVX-512"};
  return names[static_cast<std::size_t>(isa)];
}

}  // namespace ballast::kernels::simd

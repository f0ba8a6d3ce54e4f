// The instruction sets of the CPU walks. One is chosen at run time; all give the same bits.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace ballast::kernels::simd {

enum class Isa : std::uint8_t { scalar, avx2, avx512 };

std::span<const Isa> usable_isas();  // instruction sets of this build and this machine, best first; never empty
std::string_view name(Isa isa);

}  // namespace ballast::kernels::simd

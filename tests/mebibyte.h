#pragma once

#include <cstddef>

namespace ballast {

constexpr std::size_t mebibyte = std::size_t{1} << 20;

}  // namespace ballast

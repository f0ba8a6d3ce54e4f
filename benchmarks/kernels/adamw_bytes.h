// What AdamW moves, on any device.
#pragma once

#include "kernels/state_math.h"

namespace ballast::benchmarks {

// Returns the bytes that one step has to move for an element, read and written together.
inline double adamw_bytes_of_an_element(StateFormat format) {
  const double state = static_cast<double>(8 * master_bytes(format) + 2 * moment_bits(format)) / 8;
  // A remainder is of no use without its parameter, which is therefore read as well as written.
  const double parameter = format == StateFormat::fp32 ? 2 : 4;
  const double scales = has_scales(format) ? 2.0 * 2 * sizeof(float) / group_size : 0;
  return 2 + parameter + 2 * state + scales;
}

}  // namespace ballast::benchmarks

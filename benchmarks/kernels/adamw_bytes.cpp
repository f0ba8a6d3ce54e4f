#include "benchmarks/kernels/adamw_bytes.h"

#include "kernels/state_math.h"

namespace ballast::benchmarks {

double adamw_bytes_of_an_element(StateFormat format) {
  const std::size_t state = master_bytes(format) + 2 * moment_bytes(format);
  // A remainder is of no use without its parameter, which is therefore read as well as written.
  const std::size_t parameter = format == StateFormat::fp32 ? 2 : 4;
  const double scales = format == StateFormat::compact ? 2.0 * 2 * sizeof(float) / group_size : 0;
  return static_cast<double>(2 + parameter + 2 * state) + scales;
}

}  // namespace ballast::benchmarks

#include <fmt/format.h>

#include "kernels/cublas.h"

namespace ballast::kernels {

const Cublas& cublas() {
  static const Cublas loaded = load_cublas(fmt::format("libcublas.so.{}", CUBLAS_VER_MAJOR));
  return loaded;
}

}  // namespace ballast::kernels

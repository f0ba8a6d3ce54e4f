#include <cstring>

#include "kernels/checks.h"
#include "kernels/cpu.h"
#include "kernels/pieces.h"

namespace ballast::kernels {

void fill(const Cpu& cpu, const View& to, float value) {
  check_fill(to, value);
  const Stores stores = stores_for(to.bytes());
  each_piece(cpu.threads, to.count(), [&](std::size_t first, std::size_t count) {
    if (to.dtype() == DType::u8) {
      std::memset(to.data() + first, static_cast<int>(value), count);
    } else {
      cpu.walks.fill(numbers(to, first, count), value, stores);
    }
  });
}

}  // namespace ballast::kernels

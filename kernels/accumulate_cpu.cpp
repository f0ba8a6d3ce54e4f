#include "kernels/checks.h"
#include "kernels/cpu.h"
#include "kernels/pieces.h"

namespace ballast::kernels {

void accumulate(const Cpu& cpu, const ConstView& from, float scale, const View& into) {
  check_accumulate(from, into);
  each_piece(cpu.threads, from.count(), [&](std::size_t first, std::size_t count) {
    cpu.walks.accumulate(numbers(from, first, count), scale, numbers(into, first, count));
  });
}

}  // namespace ballast::kernels

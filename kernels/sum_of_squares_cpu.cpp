#include <mutex>

#include "kernels/checks.h"
#include "kernels/cpu.h"
#include "kernels/pieces.h"

namespace ballast::kernels {

void sum_of_squares(const Cpu& cpu, const ConstView& values, ExactSum* into) {
  check_floating(values, "the source of a sum of squares");
  std::mutex guard;
  each_piece(cpu.threads, values.count(), [&](std::size_t first, std::size_t count) {
    double sums[elements_per_task / group_size];
    cpu.walks.sum_of_squares(numbers(values, first, count), sums);
    ExactSum mine;
    for (std::size_t group = 0; group * group_size < count; ++group) {
      add(mine, sums[group]);
    }
    const std::lock_guard lock(guard);
    merge(*into, mine);
  });
}

}  // namespace ballast::kernels

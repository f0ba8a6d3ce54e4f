#include <atomic>

#include "kernels/checks.h"
#include "kernels/cpu.h"
#include "kernels/pieces.h"

namespace ballast::kernels {

void first_non_finite(const Cpu& cpu, const ConstView& values, std::uint64_t first_index, std::uint64_t* first) {
  check_floating(values, "the source of a search for NaN and infinity");
  std::atomic<std::size_t> found = values.count();  // the least position found so far
  each_piece(cpu.threads, values.count(), [&](std::size_t begin, std::size_t count) {
    std::size_t least = found;
    if (begin >= least) {
      return;
    }
    const std::size_t position = begin + cpu.walks.first_non_finite(numbers(values, begin, count));
    while (position < begin + count && position < least && !found.compare_exchange_weak(least, position)) {
    }
  });
  if (found < values.count()) {
    *first = std::min(*first, first_index + found);
  }
}

}  // namespace ballast::kernels

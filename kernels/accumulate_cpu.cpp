#include "kernels/checks.h"
#include "kernels/cpu.h"
#include "kernels/pieces.h"
#include "kernels/summands.h"

namespace ballast::kernels {

void begin_sum(const Cpu& cpu, const ConstView& from, const View& into) {
  check_accumulate(from, into);
  const Stores stores = stores_for(into.bytes());
  each_piece(cpu.threads, from.count(), [&](std::size_t first, std::size_t count) {
    cpu.walks.begin_sum(numbers(from, first, count), numbers(into, first, count), stores);
  });
}

void accumulate(const Cpu& cpu, const ConstView& from, float scale, const View& into) {
  check_accumulate(from, into);
  each_piece(cpu.threads, from.count(), [&](std::size_t first, std::size_t count) {
    cpu.walks.accumulate(numbers(from, first, count), scale, numbers(into, first, count));
  });
}

void sum(const Cpu& cpu, std::span<const ConstView> from, const View& into) {
  check_sum(from, into);
  const Stores stores = from.size() <= Summands::most ? stores_for(into.bytes()) : Stores::cached;
  each_piece(cpu.threads, into.count(), [&](std::size_t first, std::size_t count) {
    each_pass(from, first, count,
              [&](const Summands& summands) { cpu.walks.sum(summands, numbers(into, first, count), stores); });
  });
}

}  // namespace ballast::kernels

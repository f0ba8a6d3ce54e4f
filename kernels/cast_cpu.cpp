#include <vector>

#include "kernels/checks.h"
#include "kernels/cpu.h"
#include "kernels/pieces.h"

namespace ballast::kernels {

void cast(const Cpu& cpu, const ConstView& from, const View& to) {
  check_cast(from, to);
  const Stores stores = stores_for(to.bytes());
  each_piece(cpu.threads, from.count(), [&](std::size_t first, std::size_t count) {
    cpu.walks.cast(numbers(from, first, count), numbers(to, first, count), stores);
  });
}

void copy_pieces(const Cpu& cpu, std::span<const CopyPiece> pieces) {
  check_pieces(pieces);
  std::size_t bytes = 0;
  for (const CopyPiece& piece : pieces) {
    bytes += piece.to.bytes();
  }
  const Stores stores = stores_for(bytes);
  const CopyPlan plan(pieces, elements_per_task);
  cpu.threads.each(plan.parts(), [&](std::size_t i) {
    for (const CopyStretch& stretch : plan.part(i)) {
      const CopyPiece& piece = pieces[stretch.piece];
      const std::size_t count = stretch.end - stretch.begin;
      cpu.walks.cast(numbers(piece.from, stretch.begin, count), numbers(piece.to, stretch.begin, count), stores);
    }
  });
}

}  // namespace ballast::kernels

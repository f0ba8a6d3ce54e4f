#include "kernels/cpu.h"
#include "kernels/pieces.h"

namespace ballast::kernels {

void update(const Cpu& cpu, const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) {
  check_update(tile, runs, groups);
  const std::vector<Run> pieces = cut(runs);
  cpu.threads.each(pieces.size(), [&](std::size_t i) {
    const Run& piece = pieces[i];
    cpu.walks.update(part(tile, piece.begin, piece.count), groups[piece.group]);
  });
}

}  // namespace ballast::kernels

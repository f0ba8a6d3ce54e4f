#include <vector>

#include "kernels/cpu.h"
#include "kernels/pieces.h"

namespace ballast::kernels {
namespace {

std::vector<Run> cut(std::span<const Run> runs) {
  std::vector<Run> pieces;
  for (const Run& run : runs) {
    for (std::size_t first = 0; first < run.count; first += elements_per_task) {
      pieces.push_back({run.begin + first, std::min(elements_per_task, run.count - first), run.group});
    }
  }
  return pieces;
}

}  // namespace

void update(const Cpu& cpu, const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) {
  check_update(tile, runs, groups);
  const std::vector<Run> pieces = cut(runs);
  cpu.threads.each(pieces.size(), [&](std::size_t i) {
    const Run& piece = pieces[i];
    cpu.walks.update(part(tile, piece.begin, piece.count), groups[piece.group]);
  });
}

}  // namespace ballast::kernels

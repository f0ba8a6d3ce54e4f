#include "kernels/cpu.h"
#include "kernels/pieces.h"
#include "kernels/random_math.h"

namespace ballast::kernels {

void update(const Cpu& cpu, const TileMemory& tile, std::span<const Run> runs, std::span<const GroupStep> groups) {
  check_update(tile, runs, groups);
  const std::vector<Run> pieces = cut(runs);
  cpu.threads.each(pieces.size(), [&](std::size_t i) {
    const Run& piece = pieces[i];
    TileMemory of_piece = part(tile, piece.begin, piece.count);
    of_piece.first_index -= piece.tensor_begin;  // random bits belong to the tensor
    of_piece.rounding_stream = stream_of_tensor(tile.rounding_stream, piece.tensor);
    cpu.walks.update(of_piece, groups[piece.group]);
  });
}

}  // namespace ballast::kernels

// Packing and unpacking: many pieces of memory are copied in one call, and cast where their formats differ.
#pragma once

#include <ballast/view.h>

#include <span>
#include <vector>

namespace ballast::kernels {

struct CopyPiece {
  ConstView from;
  View to;
};

// The work of one thread: elements [begin, end) of one piece.
struct CopyStretch {
  std::size_t piece = 0;
  std::size_t begin = 0;
  std::size_t end = 0;
};

// Cuts a list of pieces of any sizes into parts of nearly equal work. Every cut inside a piece lies at a multiple of
// 128 elements, which keeps alignment.
class CopyPlan {
 public:
  CopyPlan(std::span<const CopyPiece> pieces, std::size_t work_of_part);
  std::size_t parts() const;
  std::vector<CopyStretch> part(std::size_t index) const;

 private:
  std::vector<std::size_t> counts_;
  std::vector<std::size_t> ends_;  // the work up to the end of each piece
  std::size_t work_of_part_;
};

}  // namespace ballast::kernels

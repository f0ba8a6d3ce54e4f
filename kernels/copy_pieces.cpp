#include "kernels/copy_pieces.h"

#include <algorithm>

namespace ballast::kernels {
namespace {

constexpr std::size_t cut_multiple = 128;
constexpr std::size_t work_to_start = 128;  // the cost of starting a piece, in elements

// Converts the first `work` of a piece to elements.
std::size_t elements_of(std::size_t work, std::size_t count) {
  return work >= count ? count : work / cut_multiple * cut_multiple;
}

}  // namespace

CopyPlan::CopyPlan(std::span<const CopyPiece> pieces, std::size_t work_of_part) : work_of_part_(work_of_part) {
  counts_.reserve(pieces.size());
  ends_.reserve(pieces.size());
  std::size_t work = 0;
  for (const CopyPiece& piece : pieces) {
    work += piece.from.count() + work_to_start;
    counts_.push_back(piece.from.count());
    ends_.push_back(work);
  }
}

std::size_t CopyPlan::parts() const { return ends_.empty() ? 0 : (ends_.back() + work_of_part_ - 1) / work_of_part_; }

std::vector<CopyStretch> CopyPlan::part(std::size_t index) const {
  const std::size_t begin = index * work_of_part_;
  const std::size_t end = std::min(begin + work_of_part_, ends_.back());
  auto piece = static_cast<std::size_t>(std::ranges::upper_bound(ends_, begin) - ends_.begin());
  std::vector<CopyStretch> stretches;
  for (; piece < ends_.size(); ++piece) {
    const std::size_t start = ends_[piece] - counts_[piece] - work_to_start;
    if (start >= end) {
      break;
    }
    const std::size_t first = begin > start ? elements_of(begin - start, counts_[piece]) : 0;
    const std::size_t last = elements_of(std::min(end, ends_[piece]) - start, counts_[piece]);
    if (first < last) {
      stretches.push_back({piece, first, last});
    }
  }
  return stretches;
}

}  // namespace ballast::kernels

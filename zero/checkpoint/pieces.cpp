// Reads the pieces of tensors.
#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "kernels/state_access.h"
#include "zero/checkpoint/files.h"

namespace ballast {
namespace {

// The elements of a piece that somebody needs.
struct Cut {
  SavedPiece piece{};
  std::size_t first = 0;  // element of the piece
  std::size_t into = 0;   // element of the requested range
  std::size_t count = 0;
};

// The cuts that hold the requested elements, in order. The pieces are in order and have no gaps.
std::vector<Cut> cover(std::span<const SavedPiece> pieces, const Range& range) {
  std::vector<Cut> cuts;
  auto piece =
      std::ranges::partition_point(pieces, [&](const SavedPiece& each) { return each.range.end() <= range.first; });
  for (; piece != pieces.end() && piece->range.first < range.end(); ++piece) {
    const std::size_t begin = std::max(range.first, piece->range.first);
    const std::size_t end = std::min(range.end(), piece->range.end());
    if (begin < end) cuts.push_back({*piece, begin - piece->range.first, begin - range.first, end - begin});
  }
  return cuts;
}

bool is_same(const offload::ChunkPlace& one, const offload::ChunkPlace& other) {
  return one.file == other.file && one.chunk.offset == other.chunk.offset && one.chunk.bytes == other.chunk.bytes;
}

std::vector<offload::ChunkPlace> places_of(const std::vector<SavedPiece>& wanted) {
  std::vector<offload::ChunkPlace> places;
  for (const SavedPiece& piece : wanted) {
    if (places.empty() || !is_same(places.back(), piece.place)) places.push_back(piece.place);
  }
  return places;
}

}  // namespace

std::vector<SavedPiece> SavedTensor::pieces_of(const Range& range) const {
  std::vector<SavedPiece> found;
  for (const Cut& cut : cover(pieces, range))
    found.push_back(cut.piece);
  return found;
}

TileMemory SavedTensor::tile_of(const std::string& name, const SavedPiece& piece, std::byte* chunk) const {
  const std::size_t elements = piece.record_elements > 0 ? piece.record_elements : piece.range.count;
  return kernels::part(kind.value_or(ChunkKind{.parameter = parameter_dtype(name)}).tile(chunk, elements),
                       piece.in_record, piece.range.count);
}

PieceReader::PieceReader(std::vector<std::filesystem::path> files, const std::vector<SavedPiece>& wanted)
    : files_(std::move(files)) {
  std::vector<offload::ChunkPlace> places = places_of(wanted);
  ahead_ = places.size();
  chunks_.emplace(files_, std::move(places), *queue_);
}

std::span<const std::byte> PieceReader::go_to(const SavedPiece& piece, const std::string& name) {
  if (!current_ || !is_same(*current_, piece.place)) {
    if (ahead_ == 0) {
      chunks_.emplace(files_, std::vector{piece.place}, *queue_);
      ahead_ = 1;
    }
    --ahead_;
    current_ = piece.place;
    failure_.reset();
    try {
      now_ = chunks_->next();
    } catch (const Error& error) {
      failure_ = error;
    }
  }
  if (!failure_) return now_;
  Problem problem = failure_->problem();
  problem.where += fmt::format(": {}, elements {} to {}", name, piece.range.first, piece.range.end());
  fail(failure_->code(), problem);
}

void PieceReader::copy(const std::string& name, const SavedTensor& tensor, std::size_t first, const TileMemory& into) {
  if (into.parameter_dtype == DType::u8) {
    return copy(name, tensor, {first, into.count / tensor.item_bytes}, into.parameter);
  }
  for (const Cut& cut : cover(tensor.pieces, {first, into.count})) {
    auto* const chunk = const_cast<std::byte*>(go_to(cut.piece, name).data());  // it is only read
    kernels::copy_state(kernels::part(tensor.tile_of(name, cut.piece, chunk), cut.first, cut.count),
                        kernels::part(into, cut.into, cut.count));
  }
}

void PieceReader::copy(const std::string& name, const SavedTensor& tensor, const Range& range, std::byte* into) {
  const std::size_t width = tensor.item_bytes;
  for (const Cut& cut : cover(tensor.pieces, range))
    std::ranges::copy(go_to(cut.piece, name).subspan(cut.first * width, cut.count * width), into + cut.into * width);
}

}  // namespace ballast

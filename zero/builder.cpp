#include "zero/builder.h"

#include <algorithm>

namespace ballast {

std::size_t Builder::slot(Slot slot) {
  program_.slots.push_back(std::move(slot));
  history_.emplace_back();
  return program_.slots.size() - 1;
}

void Builder::reads(Op& op, const Piece& piece) {
  if (piece.slot == none) return;
  History& history = history_[piece.slot];
  if (history.writer != none) op.after.push_back(history.writer);
  history.readers_since.push_back(program_.ops.size());
}

void Builder::writes(Op& op, const Piece& piece) {
  if (piece.slot == none) return;
  History& history = history_[piece.slot];
  if (history.writer != none) op.after.push_back(history.writer);
  op.after.insert(op.after.end(), history.readers_since.begin(), history.readers_since.end());
  history = {.writer = program_.ops.size(), .readers_since = {}};
}

std::size_t Builder::add(Op op) {
  reads(op, op.from);
  writes(op, op.to);
  writes(op, op.state);
  std::erase(op.after, program_.ops.size());
  std::ranges::sort(op.after);
  op.after.erase(std::unique(op.after.begin(), op.after.end()), op.after.end());
  program_.ops.push_back(std::move(op));
  return program_.ops.size() - 1;
}

}  // namespace ballast

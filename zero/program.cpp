#include "zero/program.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ballast {
namespace {

constexpr std::string_view kind_names[] = {"clear", "gather", "use",    "release", "reduce", "norm",
                                           "agree", "read",   "update", "write",   "commit"};

std::string piece_text(const Program& program, std::string_view label, const Piece& piece) {
  if (piece.slot == none) {
    return {};
  }
  const Slot& slot = program.slots[piece.slot];
  const bool whole = piece.first == 0 && piece.count == slot.count;
  return fmt::format(" {}={}{}", label, slot.name,
                     whole ? "" : fmt::format("[{}..{})", piece.first, piece.first + piece.count));
}

std::string op_text(const Program& program, std::size_t index) {
  const Op& op = program.ops[index];
  std::string text = fmt::format("%{} {}", index, kind_names[static_cast<std::size_t>(op.kind)]);
  if (op.kind == OpKind::use) text += fmt::format(" {}", name(op.phase));
  if (op.unit != none) text += fmt::format(" unit={}", op.unit);
  if (op.tile != none) text += fmt::format(" tile={}", op.tile);
  if (op.ranks == Ranks::replica_group) text += " over=replicas";
  text +=
      piece_text(program, "from", op.from) + piece_text(program, "to", op.to) + piece_text(program, "state", op.state);
  if (!op.after.empty()) text += fmt::format(" after=%{}", fmt::join(op.after, ",%"));
  return text + "\n";
}

}  // namespace

std::string_view name(Phase phase) {
  constexpr std::string_view names[] = {"forward", "backward", "step"};
  return names[static_cast<std::size_t>(phase)];
}

std::size_t memory_bytes(const Program& program) {
  std::size_t bytes = 0;
  for (const Slot& slot : program.slots) {
    bytes += slot.bytes();
  }
  return bytes;
}

std::string to_text(const Program& program) {
  std::string text;
  for (const Slot& slot : program.slots) {
    text += fmt::format("slot {}: {} {}\n", slot.name, slot.count, name(slot.dtype));
  }
  for (std::size_t i = 0; i < program.ops.size(); ++i) {
    text += op_text(program, i);
  }
  return text;
}

}  // namespace ballast

#include "zero/plan/program.h"

#include <fmt/format.h>

#include <array>

namespace ballast {
namespace {

std::string piece_text(const Program& program, std::string_view label, const Piece& piece) {
  if (!piece.exists()) return {};
  const Slot& slot = program.slots[piece.slot];
  const bool full = piece.begin == 0 && piece.bytes == slot.bytes;
  return fmt::format(" {}={}{}", label, slot.name, full ? "" : fmt::format("[{}..{})", piece.begin, piece.end()));
}

std::string tiles_text(const Op& op) {
  return op.tiles == 1 ? std::to_string(op.tile) : fmt::format("{}..{}", op.tile, op.tile + op.tiles - 1);
}

std::string codes_text(const Program& program, const Codes& codes) {
  if (!codes.exist()) return {};
  const std::string sums = codes.sums == codes.values ? "" : fmt::format("+{}", name(codes.sums));
  return fmt::format("{} as={}{}", piece_text(program, "codes", codes.memory), name(codes.values), sums);
}

std::string waits_text(const Op& op) {
  std::string text;
  for (const Wait& wait : op.after) {
    text += fmt::format("{}{}{}", text.empty() ? " after=" : ",", wait.is_last_steps ? '^' : '%', wait.op);
  }
  return text;
}

std::string op_text(const Program& program, const Op& op) {
  std::string text = fmt::format("{}: {}", name(op.lane), name(op.kind));
  if (op.kind == OpKind::use) text += fmt::format(" {}", name(op.phase));
  if (op.unit != none) text += fmt::format(" unit={}", op.unit);
  if (op.tile != none) text += " tile=" + tiles_text(op);
  if (op.kind == OpKind::accumulate) text += fmt::format(" sum={}", op.sum);
  if (op.ranks == Ranks::replica_group) text += " over=replicas";
  if (op.parts > 1) text += " over=part";
  if (op.exact) text += " exact";
  return text + piece_text(program, "from", op.from) + piece_text(program, "to", op.to) +
         piece_text(program, "state", op.state) + codes_text(program, op.codes) + waits_text(op) + "\n";
}

}  // namespace

bool is_of_drives(Lane lane) { return lane == Lane::disk || lane == Lane::fetch; }
bool done_in_order(Lane lane) { return !is_of_drives(lane); }

std::string_view name(OpKind kind) {
  constexpr std::string_view names[] = {"clear",  "read",       "read_first", "upload",        "gather",     "use",
                                        "reduce", "accumulate", "download",   "keep",          "norm",       "agree",
                                        "update", "momentum",   "collect",    "orthogonalize", "distribute", "write",
                                        "commit", "abandon",    "meet"};
  return names[static_cast<std::size_t>(kind)];
}

std::string_view name(Lane lane) {
  constexpr std::string_view names[] = {"compute", "gather", "reduce", "upload", "download",
                                        "update",  "host",   "disk",   "fetch"};
  return names[static_cast<std::size_t>(lane)];
}

std::string_view name(SlotRole role) {
  constexpr std::string_view names[] = {
      "parameters",     "frozen",   "gradients",    "reduced",      "state",     "blocks",   "gathered",
      "norm",           "partial",  "arriving",     "landed",       "unsummed",  "tile",     "tile_parameter",
      "tile_direction", "visitors", "directions",   "matrices",     "workspace", "first",    "staging",
      "kept",           "mirror",   "gather_codes", "reduce_codes", "received",  "host_sums"};
  return names[static_cast<std::size_t>(role)];
}

std::string_view name(Phase phase) {
  constexpr std::string_view names[] = {"forward", "backward", "step"};
  return names[static_cast<std::size_t>(phase)];
}

std::vector<bool> awaited_in(const std::vector<Op>& list) {
  std::vector<bool> awaited(list.size());
  std::array<std::size_t, lane_count> last;
  last.fill(none);
  for (std::size_t i = 0; i < list.size(); ++i) {
    last[static_cast<std::size_t>(list[i].lane)] = i;
    if (list[i].is_marked) awaited[i] = true;
    for (const Wait& wait : list[i].after) {
      awaited[wait.op] = true;
    }
  }
  for (const std::size_t op : last) {
    if (op != none) awaited[op] = true;
  }
  return awaited;
}

std::string label(const Op& op, const Model& model) {
  std::string text(name(op.kind));
  if (op.unit != none) text += " " + model.units[op.unit].name;
  if (op.tile != none) text += " tile " + tiles_text(op);
  return text;
}

std::string to_text(const Program& program) {
  std::string text;
  for (const Slot& slot : program.slots) {
    text += fmt::format("slot {}: {} bytes, {}\n", slot.name, slot.bytes, name(slot.tier));
  }
  for (const Op& op : program.entry) {
    text += "entry " + op_text(program, op);
  }
  for (std::size_t i = 0; i < program.ops.size(); ++i) {
    text += fmt::format("%{} {}", i, op_text(program, program.ops[i]));
  }
  return text;
}

}  // namespace ballast

#include "zero/plan/contents.h"

#include <fmt/format.h>

#include <algorithm>

namespace ballast {

std::string_view name(Meaning meaning) {
  constexpr std::string_view names[] = {
      "nothing known", "parameters",           "state",    "cleared gradients",
      "gradients",     "partial sum",          "sum",      "state with its new momentum",
      "direction",     "orthogonal direction", "matrices", "orthogonal matrices"};
  return names[static_cast<std::size_t>(meaning)];
}

Content Content::at(std::size_t further) const {
  Content content = *this;
  if (meaning != Meaning::unknown) content.offset += further;
  return content;
}

std::string to_text(const Content& content) {
  if (content.meaning == Meaning::unknown) return std::string(name(content.meaning));
  return fmt::format("{} of unit {} from byte {}, version {}{}", name(content.meaning), content.unit, content.offset,
                     content.version, content.decoded ? ", decoded" : "");
}

Contents::Contents(const std::vector<Slot>& slots) {
  for (const Slot& slot : slots) {
    slots_.push_back({{0, {.end = slot.bytes}}});
  }
}

// The builder's history does the same. The code is not shared on purpose: a verifier that shares code with the compiler
// shares its faults.
Contents::Memory::iterator Contents::split(Memory& memory, std::size_t at) {
  const auto next = memory.lower_bound(at);
  if (next != memory.end() && next->first == at) return next;
  const auto before = std::prev(next);
  if (before->second.end <= at) return next;
  const Stretch rest{before->second.end, before->second.content.at(at - before->first)};
  before->second.end = at;
  return memory.emplace_hint(next, at, rest);
}

void Contents::write(const Piece& piece, const Content& content) {
  if (piece.bytes == 0) return;
  Memory& memory = slots_[piece.slot];
  const auto end = split(memory, piece.end());
  memory.erase(split(memory, piece.begin), end);
  memory[piece.begin] = {piece.end(), content};
}

std::vector<std::pair<Range, Content>> Contents::parts(const Piece& piece) const {
  std::vector<std::pair<Range, Content>> parts;
  for (const auto& [begin, stretch] : slots_[piece.slot]) {
    const Range common = intersection({begin, stretch.end - begin}, {piece.begin, piece.bytes});
    if (common.count > 0) parts.push_back({common, stretch.content.at(common.first - begin)});
  }
  return parts;
}

void Contents::copy(const Piece& from, const Piece& to) {
  for (const auto& [range, content] : parts(from)) {
    write(to.part(range.first - from.begin, range.count), content);
  }
}

bool Contents::is(const Piece& piece, const Content& content) const {
  return std::ranges::all_of(
      parts(piece), [&](const auto& part) { return part.second == content.at(part.first.first - piece.begin); });
}

std::string Contents::text(const Piece& piece) const {
  std::string text;
  for (const auto& [range, content] : parts(piece)) {
    text += (text.empty() ? "" : "; ") + to_text(content);
  }
  return text;
}

Content Contents::first(const Piece& piece) const {
  const auto all = parts(piece);
  return all.empty() ? Content{} : all.front().second;
}

}  // namespace ballast

#include "zero/plan/compiler_parts.h"

#include <algorithm>

namespace ballast {

Builder::Builder(const std::vector<Slot>& slots) {
  for (const Slot& slot : slots) {
    history_.push_back({{0, {.end = slot.bytes}}});
  }
}

// The stretch that begins at `at`, cut from the one that contains it.
Builder::History::iterator Builder::split(History& history, std::size_t at) {
  const auto next = history.lower_bound(at);
  if (next != history.end() && next->first == at) return next;
  const auto before = std::prev(next);
  if (before->second.end <= at) return next;  // the slot's end
  Stretch rest = before->second;
  before->second.end = at;
  return history.emplace_hint(next, at, std::move(rest));
}

// A reader that is done after an earlier one of its lane stands for both.
void Builder::note_reader(std::vector<std::size_t>& readers) {
  const std::size_t self = ops_.size() - 1;
  const Lane lane = ops_.back().lane;
  if (done_in_order(lane)) {
    std::erase_if(readers, [&](std::size_t reader) { return ops_[reader].lane == lane; });
  }
  readers.push_back(self);
}

void Builder::reads(const Piece& piece, std::vector<std::size_t>& after) {
  if (!piece.exists() || piece.bytes == 0) return;
  History& history = history_[piece.slot];
  const auto end = split(history, piece.end());
  for (auto at = split(history, piece.begin); at != end; ++at) {
    if (at->second.writer != none) after.push_back(at->second.writer);
    note_reader(at->second.readers_since);
  }
}

void Builder::writes(const Piece& piece, std::vector<std::size_t>& after) {
  if (!piece.exists() || piece.bytes == 0) return;
  History& history = history_[piece.slot];
  const auto end = split(history, piece.end());
  const auto begin = split(history, piece.begin);
  for (auto at = begin; at != end; ++at) {
    if (at->second.writer != none) after.push_back(at->second.writer);
    after.insert(after.end(), at->second.readers_since.begin(), at->second.readers_since.end());
  }
  history.erase(begin, end);
  history[piece.begin] = {.end = piece.end(), .writer = ops_.size() - 1};
}

// Whether waiting for `op` implies waiting for an earlier operation: by the order of its lane, or by what `op` waited
// for.
bool Builder::implies(std::size_t op, std::size_t earlier) const {
  const Lane lane = ops_[earlier].lane;
  const auto in_lane = [&](std::size_t other) {
    return other == earlier || (other > earlier && done_in_order(lane) && ops_[other].lane == lane);
  };
  return in_lane(op) || std::ranges::any_of(after_[op], in_lane);
}

// Drops the waits that others imply.
void Builder::simplify(std::vector<std::size_t>& after) const {
  const std::size_t self = ops_.size() - 1;
  const Lane lane = ops_[self].lane;
  std::ranges::sort(after);
  after.erase(std::unique(after.begin(), after.end()), after.end());
  std::erase_if(after, [&](std::size_t op) { return op == self || (done_in_order(lane) && ops_[op].lane == lane); });
  for (std::size_t i = after.size(); i-- > 0;) {
    const std::size_t earlier = after[i];
    const bool implied =
        std::ranges::any_of(after, [&](std::size_t op) { return op > earlier && implies(op, earlier); });
    if (implied) after.erase(after.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

std::size_t Builder::add(Op op, const std::vector<std::size_t>& also_after) {
  std::vector<std::size_t> after = also_after;
  ops_.push_back(std::move(op));
  const Op& added = ops_.back();
  reads(added.from, after);
  writes(added.to, after);
  writes(added.state, after);
  writes(added.codes.memory, after);
  simplify(after);
  after_.push_back(std::move(after));
  return ops_.size() - 1;
}

std::vector<Op> Builder::step(std::size_t last_step, std::size_t begin) const {
  std::vector<Op> ops(ops_.begin() + static_cast<std::ptrdiff_t>(begin), ops_.end());
  for (std::size_t i = 0; i < ops.size(); ++i) {
    for (const std::size_t op : after_[begin + i]) {
      if (op < last_step) continue;
      const bool is_last_steps = op < begin;
      ops[i].after.push_back({static_cast<std::uint32_t>(op - (is_last_steps ? last_step : begin)), is_last_steps});
    }
  }
  return ops;
}

}  // namespace ballast

// The list of operations that the compiler emits, and what its parts share.
#pragma once

#include <algorithm>
#include <map>

#include "zero/plan/step_slots.h"

namespace ballast {

// Appends operations to a list and finds the earlier ones that each has to wait for: those that wrote the bytes it
// reads, and those that read or wrote the bytes it overwrites.
class Builder {
 public:
  explicit Builder(const std::vector<Slot>& slots) {
    for (const Slot& slot : slots) {
      history_.push_back({{0, {.end = slot.bytes}}});
    }
  }

  std::size_t add(Op op, const std::vector<std::size_t>& also_after = {}) {  // its index
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

  std::size_t size() const { return ops_.size(); }

  // The operations from `begin` on, as a step; the step before it begins at `last_step`. Waits for earlier operations
  // are left out, because those are over.
  std::vector<Op> step(std::size_t last_step, std::size_t begin) const {
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

 private:
  // Bytes with one history.
  struct Stretch {
    std::size_t end = 0;
    std::size_t writer = none;
    std::vector<std::size_t> readers_since{};
  };
  using History = std::map<std::size_t, Stretch>;  // the key is the first byte; no gaps

  // The stretch that begins at `at`, cut from the one that contains it.
  History::iterator split(History& history, std::size_t at) {
    const auto next = history.lower_bound(at);
    if (next != history.end() && next->first == at) return next;
    const auto before = std::prev(next);
    if (before->second.end <= at) return next;  // the slot's end
    Stretch rest = before->second;
    before->second.end = at;
    return history.emplace_hint(next, at, std::move(rest));
  }

  void reads(const Piece& piece, std::vector<std::size_t>& after) {
    if (!piece.exists() || piece.bytes == 0) return;
    History& history = history_[piece.slot];
    const auto end = split(history, piece.end());
    for (auto at = split(history, piece.begin); at != end; ++at) {
      if (at->second.writer != none) after.push_back(at->second.writer);
      note_reader(at->second.readers_since);
    }
  }

  void writes(const Piece& piece, std::vector<std::size_t>& after) {
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

  // A reader that is done after an earlier one of its lane stands for both.
  void note_reader(std::vector<std::size_t>& readers) {
    const std::size_t self = ops_.size() - 1;
    const Lane lane = ops_.back().lane;
    if (done_in_order(lane)) {
      std::erase_if(readers, [&](std::size_t reader) { return ops_[reader].lane == lane; });
    }
    readers.push_back(self);
  }

  // Whether waiting for `op` implies waiting for an earlier operation: by the order of its lane, or by what `op` waited
  // for.
  bool implies(std::size_t op, std::size_t earlier) const {
    const Lane lane = ops_[earlier].lane;
    const auto in_lane = [&](std::size_t other) {
      return other == earlier || (other > earlier && done_in_order(lane) && ops_[other].lane == lane);
    };
    return in_lane(op) || std::ranges::any_of(after_[op], in_lane);
  }

  // Drops the waits that others imply.
  void simplify(std::vector<std::size_t>& after) const {
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

  std::vector<Op> ops_;
  std::vector<std::vector<std::size_t>> after_;  // one for each operation, by index
  std::vector<History> history_;                 // one for each slot
};

// Neighbouring tiles of a unit.
struct Tiles {
  std::size_t unit = 0;
  std::size_t first = none;  // none: what moves are no tiles
  std::size_t count = 1;
};

// The input and facts about it, the slots, and the list of operations that the parts add to.
struct CompileContext {
  // Operations are emitted for `followed`, in the slots of the program that follows `program_uses`.
  CompileContext(const CompileInput& in, const Uses& program_uses, const Uses& followed, bool is_off_plan)
      : input(in), uses(followed), slots(in, program_uses), builder(slots.all()), off_plan(is_off_plan) {}
  CompileContext(const CompileContext&) = delete;

  const CompileInput& input;
  const Uses uses;
  StepSlots slots;
  Builder builder;
  bool off_plan = false;  // the uses to come are unknown, so nothing is done ahead
  // The step's agreement, or off plan the rendezvous of all ranks, if it has come: updates and writes wait for it.
  std::vector<std::size_t> agreement{};
  // The commit of the last step, until the first operation of a step in which all ranks take part takes it, ahead of all writes.
  // Before a rank overwrites the generation before the last, all ranks must have committed the last one: otherwise they might
  // have no step in common.
  std::vector<std::size_t> last_commit{};

  const Trace& trace() const { return uses.trace(); }
  std::size_t units() const { return input.model.units.size(); }
  std::size_t width(std::size_t unit) const { return input.width(unit); }
  std::size_t width_of_sums(std::size_t unit) const { return input.width_of_sums(unit); }
  const UnitLayout& layout(std::size_t unit) const { return input.layout.units[unit]; }
  const UnitResidence& residence(std::size_t unit) const { return slots.residence(unit); }

  // Adds an upload, a download, or a copy on the host (OpKind::keep).
  void copy(OpKind kind, Phase phase, const Tiles& of, const Piece& from, const Piece& to) {
    const Lane lane = kind == OpKind::upload ? Lane::upload : kind == OpKind::download ? Lane::download : Lane::host;
    builder.add({.kind = kind,
                 .lane = lane,
                 .phase = phase,
                 .unit = of.unit,
                 .tile = of.first,
                 .tiles = of.count,
                 .from = from,
                 .to = to});
  }
};

}  // namespace ballast

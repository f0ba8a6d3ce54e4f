// The traffic of activations, which the simulator adds to a program.
#include <algorithm>
#include <utility>

#include "zero/plan/simulate.h"

namespace ballast {
namespace {

constexpr std::size_t units_on_device = 2;

class Traffic {
 public:
  Traffic(const Program& program, std::span<const UnitWork> work, Tier tier) : in_(program), work_(work), tier_(tier) {}

  std::vector<Op> ops() && {
    for (std::size_t i = 0; i < in_.ops.size(); ++i) {
      const Op& op = in_.ops[i];
      const bool moves = op.kind == OpKind::use && work_[op.unit].offloaded_bytes > 0;
      if (moves && op.phase == Phase::backward) bring(i);
      moved_to_.push_back(add(op));
      if (!moves) continue;
      if (op.phase == Phase::backward) {
        wait_for_return(ops_.back());
      } else {
        wait_for_room(ops_.back());
        take_away(op.unit);
      }
    }
    renumber();
    return std::move(ops_);
  }

 private:
  struct Saved {
    std::size_t unit = 0;
    std::size_t left = none;      // the operation that takes it away
    std::size_t returned = none;  // the operation that brings it back
  };

  std::size_t add(Op op) {
    ops_.push_back(std::move(op));
    return ops_.size() - 1;
  }

  // The program's own waits name operations by their numbers there. They come before those that were added here.
  void renumber() {
    for (std::size_t i = 0; i < in_.ops.size(); ++i) {
      std::vector<Wait>& after = ops_[moved_to_[i]].after;
      for (std::size_t own = 0; own < in_.ops[i].after.size(); ++own) {
        after[own].op = static_cast<std::uint32_t>(moved_to_[after[own].op]);
      }
    }
  }

  std::size_t copy(OpKind kind, Lane lane, Phase phase, const Saved& saved, std::size_t after) {
    const Piece bytes{.bytes = work_[saved.unit].offloaded_bytes};
    return add({.kind = kind,
                .lane = lane,
                .phase = phase,
                .unit = saved.unit,
                .from = bytes,
                .to = bytes,
                .after = {{static_cast<std::uint32_t>(after), false}}});
  }

  void take_away(std::size_t unit) {
    Saved saved{.unit = unit};
    saved.left = copy(OpKind::download, Lane::download, Phase::forward, saved, ops_.size() - 1);
    if (tier_ == Tier::nvme) saved.left = copy(OpKind::write, Lane::disk, Phase::forward, saved, saved.left);
    saved_.push_back(saved);
  }

  void wait_for_room(Op& use) const {
    if (saved_.size() >= units_on_device) wait(use, saved_[saved_.size() - units_on_device].left);
  }

  // Brings back the activations of this backward use, unless it was done ahead, and those of the next one.
  void bring(std::size_t use) {
    bring_last_of(in_.ops[use].unit);
    for (std::size_t next = use + 1; next < in_.ops.size(); ++next) {
      const Op& op = in_.ops[next];
      if (op.kind != OpKind::use || work_[op.unit].offloaded_bytes == 0) continue;
      if (op.phase == Phase::backward) bring_last_of(op.unit);
      return;
    }
  }

  void bring_last_of(std::size_t unit) {
    Saved* const saved = last_of(unit);
    if (saved == nullptr || saved->returned != none) return;
    std::size_t from = saved->left;
    if (tier_ == Tier::nvme) from = copy(OpKind::read, Lane::disk, Phase::backward, *saved, from);
    saved->returned = copy(OpKind::upload, Lane::upload, Phase::backward, *saved, from);
  }

  void wait_for_return(Op& use) {
    Saved* const saved = last_of(use.unit);
    if (saved == nullptr) return;
    wait(use, saved->returned);
    saved_.erase(saved_.begin() + (saved - saved_.data()));
  }

  Saved* last_of(std::size_t unit) {
    const auto found =
        std::find_if(saved_.rbegin(), saved_.rend(), [&](const Saved& each) { return each.unit == unit; });
    return found == saved_.rend() ? nullptr : &*found;
  }

  static void wait(Op& op, std::size_t other) { op.after.push_back({static_cast<std::uint32_t>(other), false}); }

  const Program& in_;
  std::span<const UnitWork> work_;
  Tier tier_;
  std::vector<Op> ops_;
  std::vector<std::size_t> moved_to_;  // the number now, for each operation of the program
  std::vector<Saved> saved_;           // those that are saved and not used in backward yet
};

}  // namespace

Program with_activations(const Program& program, std::span<const UnitWork> work, Tier tier) {
  Program with = program;
  if (tier != Tier::device) with.ops = Traffic(program, work, tier).ops();
  return with;
}

}  // namespace ballast

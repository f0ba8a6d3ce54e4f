#include "zero/engine/freed_ops.h"

#include <algorithm>

namespace ballast {
namespace {

bool are_free(const std::vector<const OpStatus*>& ops) {
  return std::ranges::all_of(ops, [](const OpStatus* op) { return op->is_free; });
}

}  // namespace

void FreedOps::add(const IssuedOp& issued) {
  const Held op{&issued.status, issued.after, issued.op.lane, issued.takes_turns};
  std::size_t& held_before = held_in_lane_[static_cast<std::size_t>(op.lane)];
  if (held_before == 0 && are_free(op.after)) return free(op);
  op.status->is_free = false;
  ++held_before;
  held_.push_back(op);
}

void FreedOps::look() {
  std::deque<Held> still_held;
  std::array<std::size_t, lane_count> in_lane{};
  for (const Held& op : held_) {
    std::size_t& held_before = in_lane[static_cast<std::size_t>(op.lane)];
    if (held_before == 0 && are_free(op.after)) {
      free(op);
      continue;
    }
    ++held_before;
    still_held.push_back(op);
  }
  held_ = std::move(still_held);
  held_in_lane_ = in_lane;
}

void FreedOps::free(const Held& op) {
  op.status->is_free = true;
  if (op.takes_turns) exchanges_.add(op.status);
}

}  // namespace ballast

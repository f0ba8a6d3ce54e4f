#include "zero/engine/send_ahead.h"

#include <algorithm>

namespace ballast {
namespace {

// Of the operations in lanes that exchange, the others compute.
bool exchanges(OpKind kind) { return kind != OpKind::clear && kind != OpKind::norm && kind != OpKind::accumulate; }

}  // namespace

void LaneQueue::issued(const IssuedOp& op) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(op);
}

void LaneQueue::begun(const Op& op) {
  const std::lock_guard lock(mutex_);
  current_ = &op;
  waiting_.pop_front();
}

// A wait for an earlier operation of the same lane is not listed in the operation, so this looks at what those write.
const Op* LaneQueue::next_exchange() {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(waiting_, [](const IssuedOp& each) { return exchanges(each.op.kind); });
  if (found == waiting_.end()) return nullptr;
  const Piece& sent = found->op.from;
  const auto changes_it = [&](const Op& op) {
    return overlap(op.to, sent) || overlap(op.state, sent) || overlap(op.codes.memory, sent);
  };
  const bool is_ready = std::ranges::all_of(found->after, &OpStatus::has_succeeded);
  const bool is_changed = changes_it(*current_) || std::any_of(waiting_.begin(), found, [&](const IssuedOp& each) {
                            return changes_it(each.op);
                          });
  return is_ready && !is_changed ? &found->op : nullptr;
}

}  // namespace ballast

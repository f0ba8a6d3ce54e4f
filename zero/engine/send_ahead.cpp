#include "zero/engine/send_ahead.h"

#include <algorithm>

#include "zero/engine/slots.h"

namespace ballast {

namespace {

// The other operations in lanes that exchange only compute.
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

SendAhead::SendAhead(const CompiledPlan& plan, const Slots& slots, Mesh& mesh)
    : plan_(plan), slots_(slots), mesh_(mesh) {
  mesh_.gather->use_look_ahead(&gather_);
  mesh_.reduce->use_look_ahead(&reduce_);
}

SendAhead::~SendAhead() {
  mesh_.gather->use_look_ahead(nullptr);
  mesh_.reduce->use_look_ahead(nullptr);
}

void SendAhead::issued(const IssuedOp& op) {
  if (LaneLookAhead* const lane = of(op.op.lane)) lane->queue.issued(op);
}

void SendAhead::begun(const Op& op) {
  if (LaneLookAhead* const lane = of(op.lane)) lane->queue.begun(op);
}

SendAhead::LaneLookAhead* SendAhead::of(Lane lane) {
  if (lane == Lane::gather) return &gather_;
  return lane == Lane::reduce ? &reduce_ : nullptr;
}

std::optional<NextCollective> SendAhead::LaneLookAhead::next() {
  const Op* const op = queue.next_exchange();
  return op == nullptr ? std::nullopt : owner.collective_of(*op);
}

// Returns none for an exchange that is not sent ahead: one of encoded values, which have yet to be made, or of other ranks than
// those of the lane's own communicator.
std::optional<NextCollective> SendAhead::collective_of(const Op& op) const {
  if (op.codes.exist() || op.ranks != Ranks::shard_group) return std::nullopt;
  if (op.kind == OpKind::gather && op.lane == Lane::gather) {
    return NextCollective{.kind = Collective::all_gather, .sent = views_of_gather(plan_, slots_, op).from};
  }
  if (op.kind != OpKind::reduce) return std::nullopt;
  const auto [from, to] = views_of_reduction(plan_, slots_, op);
  return NextCollective{.kind = Collective::reduce_scatter, .sent = from, .count = to.count(), .sum = to.dtype()};
}

}  // namespace ballast

#include "zero/engine/send_ahead.h"

#include <algorithm>

#include "zero/engine/exchange_views.h"

namespace ballast {
namespace {

bool overlap(const Piece& one, const Piece& other) {
  return one.exists() && one.slot == other.slot && one.begin < other.end() && other.begin < one.end();
}

// Whether an operation of a lane that exchanges does so. The others of that lane compute.
bool exchanges(OpKind kind) { return kind != OpKind::clear && kind != OpKind::norm && kind != OpKind::accumulate; }

}  // namespace

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
  if (OfLane* const lane = of(op.op.lane)) lane->issued(op);
}

void SendAhead::begun(const Op& op) {
  if (OfLane* const lane = of(op.lane)) lane->begun(op);
}

SendAhead::OfLane* SendAhead::of(Lane lane) {
  if (lane == Lane::gather) return &gather_;
  return lane == Lane::reduce ? &reduce_ : nullptr;
}

// Returns none for an exchange that is not sent ahead: one of encoded values, which have yet to be made, or of other ranks than
// those of the lane's communicator.
std::optional<NextCollective> SendAhead::collective_of(const Op& op) const {
  if (op.codes.exist() || op.ranks != Ranks::shard_group) return std::nullopt;
  if (op.kind == OpKind::gather && op.lane == Lane::gather) {
    return NextCollective{.kind = Collective::all_gather, .sent = views_of_gather(plan_, slots_, op).from};
  }
  if (op.kind != OpKind::reduce) return std::nullopt;
  const ExchangeViews views = views_of_reduction(plan_, slots_, op);
  return NextCollective{
      .kind = Collective::reduce_scatter, .sent = views.from, .count = views.to.count(), .sum = views.to.dtype()};
}

void SendAhead::OfLane::issued(const IssuedOp& op) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(op);
}

void SendAhead::OfLane::begun(const Op& op) {
  const std::lock_guard lock(mutex_);
  current_ = &op;
  waiting_.pop_front();
}

// A wait for an earlier operation of the same lane is not listed in the operation, so this looks at what those write.
std::optional<NextCollective> SendAhead::OfLane::next() {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(waiting_, [](const IssuedOp& each) { return exchanges(each.op.kind); });
  if (found == waiting_.end()) return std::nullopt;
  const Piece& sent = found->op.from;
  const bool is_ready = std::ranges::all_of(found->after, [](const OpStatus* other) { return other->is_done(); });
  const bool is_written =
      overlap(current_->to, sent) ||
      std::any_of(waiting_.begin(), found, [&](const IssuedOp& each) { return overlap(each.op.to, sent); });
  return is_ready && !is_written ? all_.collective_of(found->op) : std::nullopt;
}

}  // namespace ballast

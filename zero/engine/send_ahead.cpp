#include "zero/engine/send_ahead.h"

#include "zero/engine/slots.h"

namespace ballast {

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
  if (OfLane* const lane = of(op.op.lane)) lane->queue.issued(op);
}

void SendAhead::begun(const Op& op) {
  if (OfLane* const lane = of(op.lane)) lane->queue.begun(op);
}

SendAhead::OfLane* SendAhead::of(Lane lane) {
  if (lane == Lane::gather) return &gather_;
  return lane == Lane::reduce ? &reduce_ : nullptr;
}

std::optional<NextCollective> SendAhead::OfLane::next() {
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

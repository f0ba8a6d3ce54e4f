// Tells the communicators of a mesh which exchange their lane makes next. Between hosts its first bytes are sent while the exchange
// before it ends, so that no link waits for what a lane does between the two.
#pragma once

#include <algorithm>
#include <deque>
#include <mutex>

#include "zero/comm/call.h"
#include "zero/engine/mesh.h"
#include "zero/engine/slots.h"
#include "zero/engine/step_run.h"
#include "zero/plan/compile.h"

namespace ballast {

// The operations of a lane that are issued and have not begun.
class LaneQueue {
 public:
  void issued(const IssuedOp& op) {  // called by the trainer's thread, in order
    const std::lock_guard lock(mutex_);
    waiting_.push_back(op);
  }

  void begun(const Op& op) {  // called by the lane's thread, like the two below
    const std::lock_guard lock(mutex_);
    current_ = &op;
    waiting_.pop_front();
  }

  // The lane's next exchange between ranks, if all that it waits for has succeeded, and nothing that comes before it in the
  // lane changes what it sends. Null otherwise.
  // A wait for an earlier operation of the same lane is not listed in the operation, so this looks at what those write.
  const Op* next_exchange() {
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

 private:
  // The other operations in lanes that exchange only compute.
  static bool exchanges(OpKind kind) {
    return kind != OpKind::clear && kind != OpKind::norm && kind != OpKind::accumulate;
  }

  std::mutex mutex_;  // guards the queue
  std::deque<IssuedOp> waiting_;
  const Op* current_ = nullptr;  // the lane's thread alone uses it
};

// Lanes that work on the host have one. Exchanges between GPUs are issued to a stream, and their bytes are not there
// yet.
class SendAhead {
 public:
  // All of it outlives this object. The mesh asks it in collectives, and belongs to one engine.
  SendAhead(const CompiledPlan& plan, const Slots& slots, Mesh& mesh) : plan_(plan), slots_(slots), mesh_(mesh) {
    mesh_.gather->use_look_ahead(&gather_);
    mesh_.reduce->use_look_ahead(&reduce_);
  }

  ~SendAhead() {
    mesh_.gather->use_look_ahead(nullptr);
    mesh_.reduce->use_look_ahead(nullptr);
  }

  SendAhead(const SendAhead&) = delete;
  SendAhead& operator=(const SendAhead&) = delete;

  void issued(const IssuedOp& op) {  // called by the trainer's thread, in order
    if (LaneLookAhead* const lane = of(op.op.lane)) lane->queue.issued(op);
  }

  void begun(const Op& op) {  // called by the lane's thread
    if (LaneLookAhead* const lane = of(op.lane)) lane->queue.begun(op);
  }

 private:
  struct LaneLookAhead : LookAhead {
    explicit LaneLookAhead(const SendAhead& of) : owner(of) {}
    std::optional<NextCollective> next() override {
      const Op* const op = queue.next_exchange();
      return op == nullptr ? std::nullopt : owner.collective_of(*op);
    }

    const SendAhead& owner;
    LaneQueue queue{};
  };

  LaneLookAhead* of(Lane lane) {  // null: the lane exchanges nothing
    if (lane == Lane::gather) return &gather_;
    return lane == Lane::reduce ? &reduce_ : nullptr;
  }

  // Returns none for an exchange that is not sent ahead: one of encoded values, which have yet to be made, or of other ranks than
  // those of the lane's own communicator.
  std::optional<NextCollective> collective_of(const Op& op) const {
    if (op.codes.exist() || op.ranks != Ranks::shard_group || op.parts > 1) return std::nullopt;
    if (op.kind == OpKind::gather && op.lane == Lane::gather) {
      return NextCollective{.kind = Collective::all_gather, .sent = views_of_gather(plan_, slots_, op).from};
    }
    if (op.kind != OpKind::reduce) return std::nullopt;
    const auto [from, to] = views_of_reduction(plan_, slots_, op);
    return NextCollective{.kind = Collective::reduce_scatter, .sent = from, .count = to.count(), .sum = to.dtype()};
  }

  const CompiledPlan& plan_;
  const Slots& slots_;
  Mesh& mesh_;
  LaneLookAhead gather_{*this};
  LaneLookAhead reduce_{*this};
};

}  // namespace ballast

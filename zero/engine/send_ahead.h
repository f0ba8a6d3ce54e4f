// What a lane exchanges next. Between hosts its first bytes are sent while the exchange before it ends, so that no link waits for
// what a lane does between two exchanges.
#pragma once

#include "zero/comm/look_ahead.h"
#include "zero/engine/lane_queue.h"
#include "zero/engine/mesh.h"
#include "zero/engine/slots.h"
#include "zero/plan/compiled_plan.h"

namespace ballast {

// Of lanes of the host. On a GPU, exchanges wait for each other there.
class SendAhead {
 public:
  // All of it outlives this object, which the mesh asks in collectives until then.
  SendAhead(const CompiledPlan& plan, const Slots& slots, Mesh& mesh);
  ~SendAhead();
  SendAhead(const SendAhead&) = delete;
  SendAhead& operator=(const SendAhead&) = delete;

  void issued(const IssuedOp& op);  // by the trainer's thread, in order
  void begun(const Op& op);         // by the lane's thread

 private:
  struct OfLane : LookAhead {
    explicit OfLane(const SendAhead& owner) : all(owner) {}
    std::optional<NextCollective> next() override;

    const SendAhead& all;
    LaneQueue queue{};
  };

  OfLane* of(Lane lane);  // null: the lane exchanges nothing
  std::optional<NextCollective> collective_of(const Op& op) const;

  const CompiledPlan& plan_;
  const Slots& slots_;
  Mesh& mesh_;
  OfLane gather_{*this};
  OfLane reduce_{*this};
};

}  // namespace ballast

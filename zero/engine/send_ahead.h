// Tells the communicators of a mesh which exchange their lane makes next. Between hosts its first bytes are sent while the exchange
// before it ends, so that no link waits for what a lane does between the two.
#pragma once

#include "zero/comm/call.h"
#include "zero/engine/mesh.h"
#include "zero/engine/slots.h"
#include "zero/plan/compiled_plan.h"

namespace ballast {

// For lanes that work on the host. Exchanges between GPUs are issued to a stream, and their bytes are not there yet.
class SendAhead {
 public:
  // All of it outlives this object. The mesh asks it in collectives, and belongs to one engine.
  SendAhead(const CompiledPlan& plan, const Slots& slots, Mesh& mesh);
  ~SendAhead();
  SendAhead(const SendAhead&) = delete;
  SendAhead& operator=(const SendAhead&) = delete;

  void issued(const IssuedOp& op);  // by the trainer's thread, in order
  void begun(const Op& op);         // by the lane's thread

 private:
  struct OfLane : LookAhead {
    explicit OfLane(const SendAhead& of) : owner(of) {}
    std::optional<NextCollective> next() override;

    const SendAhead& owner;
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

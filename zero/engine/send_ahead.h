// What a lane exchanges next. Between hosts its first bytes are sent while the exchange before it ends, so that no link waits for
// what a lane does between two exchanges.
#pragma once

#include <array>
#include <deque>
#include <mutex>

#include "zero/comm/look_ahead.h"
#include "zero/engine/issued_op.h"
#include "zero/engine/mesh.h"
#include "zero/engine/slots.h"
#include "zero/plan/compiled_plan.h"

namespace ballast {

// Of lanes of the host. On a GPU, exchanges wait for each other there.
class SendAhead {
 public:
  // All of it outlives this object, and asks it no more after that.
  SendAhead(const CompiledPlan& plan, const Slots& slots, Mesh& mesh);
  ~SendAhead();
  SendAhead(const SendAhead&) = delete;
  SendAhead& operator=(const SendAhead&) = delete;

  void issued(const IssuedOp& op);  // by the trainer's thread, in order
  void begun(const Op& op);         // by the lane's thread

 private:
  class OfLane : public LookAhead {
   public:
    explicit OfLane(const SendAhead& all) : all_(all) {}

    void issued(const IssuedOp& op);
    void begun(const Op& op);
    std::optional<NextCollective> next() override;

   private:
    const SendAhead& all_;
    std::mutex mutex_;                // of the queue
    std::deque<IssuedOp> waiting_{};  // for their turn
    const Op* current_ = nullptr;     // the lane's own thread uses it
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

// Tells the communicators of a mesh which exchange their lane makes next. Between hosts its first bytes are sent while the exchange
// before it ends, so that no link waits for what a lane does between the two.
#pragma once

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
  void issued(const IssuedOp& op);  // called by the trainer's thread, in order
  void begun(const Op& op);         // called by the lane's thread, like the two below

  // The lane's next exchange between ranks, if all that it waits for has succeeded, and nothing that comes before it in the
  // lane changes what it sends. Null otherwise.
  const Op* next_exchange();

 private:
  std::mutex mutex_;  // guards the queue
  std::deque<IssuedOp> waiting_;
  const Op* current_ = nullptr;  // the lane's thread alone uses it
};

// Lanes that work on the host have one. Exchanges between GPUs are issued to a stream, and their bytes are not there
// yet.
class SendAhead {
 public:
  // All of it outlives this object. The mesh asks it in collectives, and belongs to one engine.
  SendAhead(const CompiledPlan& plan, const Slots& slots, Mesh& mesh);
  ~SendAhead();
  SendAhead(const SendAhead&) = delete;
  SendAhead& operator=(const SendAhead&) = delete;

  void issued(const IssuedOp& op);  // called by the trainer's thread, in order
  void begun(const Op& op);         // called by the lane's thread

 private:
  struct LaneLookAhead : LookAhead {
    explicit LaneLookAhead(const SendAhead& of) : owner(of) {}
    std::optional<NextCollective> next() override;

    const SendAhead& owner;
    LaneQueue queue{};
  };

  LaneLookAhead* of(Lane lane);  // null: the lane exchanges nothing
  std::optional<NextCollective> collective_of(const Op& op) const;

  const CompiledPlan& plan_;
  const Slots& slots_;
  Mesh& mesh_;
  LaneLookAhead gather_{*this};
  LaneLookAhead reduce_{*this};
};

}  // namespace ballast

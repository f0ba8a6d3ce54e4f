// The operations of a lane that are issued and have not begun.
#pragma once

#include <deque>
#include <mutex>

#include "zero/engine/step_run.h"

namespace ballast {

class LaneQueue {
 public:
  void issued(const IssuedOp& op);  // by the trainer's thread, in order
  void begun(const Op& op);         // by the lane's thread, as the two below

  // The lane's next exchange between ranks, if all that it waits for has succeeded, and nothing that comes before it in the lane changes
  // what it sends. Null otherwise.
  const Op* next_exchange();

 private:
  std::mutex mutex_;  // of the queue
  std::deque<IssuedOp> waiting_;
  const Op* current_ = nullptr;  // the lane's thread alone uses it
};

}  // namespace ballast

// Which of the issued operations the trainer does not hold up any more.
#pragma once

#include <array>
#include <deque>

#include "zero/engine/exchange_order.h"
#include "zero/engine/step_run.h"

namespace ballast {

// An operation is free of the trainer when all uses are over for which it waits, or for which operations wait that it waits for,
// or operations before it in its lane. From then on it needs nothing but the lanes to end. The order in which exchanges become
// free depends on the trainer's calls alone, and not on the speed of a rank: it is the same on all ranks, also of several trainings
// whose trainers are one thread. In that order exchanges take turns, so none waits for one that needs the trainer.
//
// Used by the trainer's thread.
class FreedOps {
 public:
  explicit FreedOps(ExchangeTurns& exchanges) : exchanges_(exchanges) {}

  void add(const IssuedOp& issued);
  void look();  // called when a use has ended

 private:
  struct Held {
    OpStatus* status;
    std::vector<const OpStatus*> after;
    Lane lane;
    bool takes_turns;
  };

  void free(const Held& op);

  ExchangeTurns& exchanges_;
  std::deque<Held> held_;  // listed in the order in which they were issued
  std::array<std::size_t, lane_count> held_in_lane_{};
};

}  // namespace ballast

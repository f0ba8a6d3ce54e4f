// The next collective of a communicator, as its caller knows it before it calls.
#pragma once

#include <ballast/view.h>

#include <optional>

#include "zero/comm/call.h"

namespace ballast {

// The arguments of a call of all_gather() or reduce_scatter() that a sender needs.
struct NextCollective {
  Collective kind = Collective::all_gather;
  ConstView sent{};
  std::size_t count = 0;    // of a reduction: elements of this rank's part
  DType sum = DType::fp32;  // of a reduction: the format of the sum
};

class LookAhead {
 public:
  virtual ~LookAhead() = default;
  // Called by the thread that calls the communicator, in the middle of a collective. Returns the collective that this thread calls
  // next of this communicator, if the values that it sends are final. They stay as they are until the end of that call, or, if a
  // failure prevents it, until Communicator::use_look_ahead() is called. No other call comes in between.
  virtual std::optional<NextCollective> next() = 0;
};

}  // namespace ballast

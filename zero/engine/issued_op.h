// An operation on its way to its lane.
#pragma once

#include <vector>

#include "zero/engine/step_run.h"

namespace ballast {

struct IssuedOp {
  const Op& op;
  OpStatus& status;
  StepRun& run;
  std::vector<const OpStatus*> after{};  // begins when these are done
  bool takes_turns = false;              // with other exchanges between GPUs
};

}  // namespace ballast

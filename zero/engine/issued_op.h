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
  std::size_t ticket = none;             // of the sequencer, for an exchange between GPUs
};

}  // namespace ballast

// A round of joint runs, as their commits hold it.
#pragma once

#include <ballast/records.h>

#include "offload/record_format.h"

namespace ballast {

inline offload::CommitLabel label_of(const JointRound& round) { return {round.start, round.number, round.members}; }

inline JointRound round_of(const offload::CommitLabel& label) {
  return {.start = label[0], .number = label[1], .members = label[2]};
}

}  // namespace ballast

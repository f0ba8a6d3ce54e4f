// A machine, real or imagined, as one rank sees it: how much it may use of each tier, and how fast bytes move.
#pragma once

#include <array>
#include <cstddef>

#include "zero/plan/placement.h"

namespace ballast {

struct Machine {
  std::array<std::size_t, tier_count> bytes{};  // by tier, that a program may reserve

  // Bytes a second.
  double gather = 0;
  double reduce = 0;
  double upload = 0;
  double download = 0;
  double read = 0;  // from drives; reads and writes share their time
  double write = 0;
  double device_memory = 0;  // of updates and sums there
  double host_memory = 0;

  // Seconds.
  double collective_latency = 20e-6;
  double commit_latency = 5e-3;

  bool shares_cores = false;    // the trainer and all lanes but the disk's compute on the same cores: those of a CPU
  bool host_is_device = false;  // a CPU's: what lies on the host counts against the device's bytes, and is no choice
};

// What the trainer computes with a unit.
struct UnitWork {
  double forward_seconds = 0;
  double backward_seconds = 0;
};

}  // namespace ballast

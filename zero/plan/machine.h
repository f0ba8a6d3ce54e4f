// A machine, real or imagined, as one rank sees it: the bytes that it may use of each tier, and how fast they move.
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

  bool shares_cores = false;    // a CPU: the trainer and all lanes except those of drives compute on the same cores
  bool host_is_device = false;  // a CPU: bytes on the host count as the device's, and the host is no choice
};

// The time that the trainer computes with a unit.
struct UnitWork {
  double forward_seconds = 0;
  double backward_seconds = 0;
};

}  // namespace ballast

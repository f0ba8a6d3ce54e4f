// Measures how fast bytes move on this machine, for the simulator.
#pragma once

#include <ballast/comm.h>
#include <ballast/planner.h>

#include <filesystem>

#include "zero/plan/compiled_plan.h"

namespace ballast::gpt {

struct RateOptions {
  std::size_t unit_elements = std::size_t{4} << 20;
  std::size_t tile_elements = std::size_t{256} << 10;
  StateFormat format = StateFormat::split;
  int threads = 0;                                   // of this rank's updates
  std::vector<std::filesystem::path> directories{};  // of the drives; empty: they are not measured
  std::size_t drive_bytes = std::size_t{256} << 20;  // at most, of a rank's records there
};

// Measures with the code of the engine. All ranks measure at the same time, so that each gets its share of common
// resources. Returns the same on all ranks: the rates of the slowest.
Machine measure_rates(Communicator& world, const RateOptions& options);

}  // namespace ballast::gpt

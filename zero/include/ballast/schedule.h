// The order of a step: its phases and lanes, the order in which a trainer uses units, and how far ahead it works.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace ballast {

enum class Phase : std::uint8_t { forward, backward, step };
inline constexpr std::size_t phase_count = 3;

// An ordered queue of work that runs in parallel with the other lanes. `compute` belongs to the trainer; `host`
// computes in host memory; `disk` and `fetch` use the drives; all others work on the device. The operations of a lane
// are done in order, except that `disk` and `fetch` have many requests in flight. `fetch` reads parameters for the
// trainer, so that they do not queue behind the updates on `disk`.
enum class Lane : std::uint8_t { compute, gather, reduce, upload, download, update, host, disk, fetch };
inline constexpr std::size_t lane_count = 9;

std::string_view name(Lane lane);
std::string_view name(Phase phase);

// A use of a unit.
struct Visit {
  std::size_t unit = 0;
  Phase phase = Phase::forward;
  // Its memory is needed until the next visit ends, which uses its tied tensors. Plans add these visits to a trace by themselves.
  bool held = false;
  bool exact = false;  // uses the parameters as ranks keep them, even if Wire::gather is not exact

  bool operator==(const Visit&) const = default;
};

using Trace = std::vector<Visit>;  // the uses of one micro-step

// The rates, in bytes a second, by which a program chooses between ways that give the same bits. If `host_memory` is 0, the GPU updates
// no tile whose state is on the host. If `shared` is 0, nothing passes between ranks through the host's memory. All ranks use those of
// rank 0.
struct TransferRates {
  double upload = 0;
  double download = 0;
  double host_memory = 0;  // of updates on the host
  double peers = 0;        // between GPUs of a machine
  double shared = 0;       // from host memory that the ranks of a machine share, to each GPU
};

// How far ahead a program works, and when it updates. Changes no bit of the training.
struct Schedule {
  std::size_t prefetch = 1;        // how many units are gathered ahead
  std::size_t gathered_bytes = 0;  // bytes for full parameters that are not kept; at least what prefetching needs
  std::size_t staging_slots = 8;   // records in memory at once, on their way from and to the drive
  std::size_t kept_records = 0;    // tiles whose records stay in memory and are not read: the first ones of a step
  // All micro-steps of a step go through a unit before the next unit: the trainer makes the uses of a unit in a row, one for each
  // micro-step, and keeps what lies between units. So parameters are gathered, uploaded and read once a pass, not once a micro-step.
  bool layer_major = false;
  bool update_in_backward = false;  // as soon as a unit's gradients are summed; then nothing can be clipped or skipped
  // With a run on drives (RecordOptions::run), whose records keep the state of the last step until the commit, units are updated as
  // soon as their gradients are summed. Where the step then clips, is skipped or has other options than expected, the updates are
  // made again, from the records of the last step. While a larger share of steps than this would repeat their updates, units are
  // updated after the norm, as they are without a run, and in all steps if it is 0.
  double most_repeats = 0.25;
  // Units are updated and gathered in the order of the next forward, even if only backward uses are leased, and
  // Training::wait_for_parameters() can wait for each unit.
  bool overlap_gathers = false;
};

}  // namespace ballast

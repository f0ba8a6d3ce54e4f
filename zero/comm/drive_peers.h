// Ranks of one machine that keep records on one drive, and how far each of them is.
#pragma once

#include <ballast/comm.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "zero/comm/shared_memory.h"

namespace ballast {

// A drive need not serve ranks equally: a queue that one rank has alone may get as much of it as a queue that three ranks share.
// Then one rank ends its step early, and all wait for the slowest. So a step has rounds of a few records, and no rank begins a round
// before all others are near the end of the last one. Rounds are no shorter than that, because a drive that changes between queues
// at each record loses time. All ranks of a training move as many records in a step, in the same order, so that no rank waits for
// one that waits for it. Rounds order, and guard nothing: a rank that has died, left or stands still is waited for no longer than
// its patience.
class DrivePeers {
 public:
  static constexpr std::size_t lanes = 2;  // that move records, each in an order of its own
  static constexpr std::size_t rounds_of_step = 8;

  // All ranks of a training call it together. `drive`: the device. `records`: those that a rank moves in a step. Ranks whose memory
  // this one cannot map take no turns with it.
  DrivePeers(Communicator& world, std::uint64_t drive, std::size_t records, std::chrono::milliseconds patience);
  ~DrivePeers() { leave(); }

  void begin_record(std::size_t lane);  // waits for its round; one thread at a time for each lane
  void leave() noexcept;                // no rank waits for this one from now on; any thread may call

 private:
  using Begun = std::array<std::atomic<std::uint64_t>, lanes>;  // records, or `has_left`
  static constexpr std::uint64_t has_left = UINT64_MAX;
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "atomics in shared memory must be lock-free");

  struct Peer {
    SharedMemory memory;
    std::string invitation;
    std::array<std::uint64_t, lanes> given_up{has_left, has_left};  // records at which it stood still, or died
  };

  static Begun& begun(const SharedMemory& memory) { return *reinterpret_cast<Begun*>(memory.data()); }
  void wait_for(Peer& peer, std::size_t lane, std::uint64_t mine) const;

  std::uint64_t round_;  // records
  std::chrono::milliseconds patience_;
  SharedMemory memory_;
  std::vector<Peer> peers_;
};

}  // namespace ballast

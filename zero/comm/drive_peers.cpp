#include "zero/comm/drive_peers.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <sstream>
#include <thread>

#include "zero/comm/on_all_ranks.h"

namespace ballast {
namespace {

constexpr std::chrono::microseconds pause{200};  // a record takes several milliseconds

}  // namespace

DrivePeers::DrivePeers(Communicator& world, std::uint64_t drive, std::size_t records,
                       std::chrono::milliseconds patience)
    : round_(std::max<std::size_t>(1, records / rounds_of_step)),
      patience_(patience),
      memory_(SharedMemory::make(sizeof(Begun), "turns of ranks on a drive")) {
  new (memory_.data()) Begun{};
  const std::string device = fmt::format("{} ", drive);
  const auto texts = texts_of_all(world, device + memory_.invitation());
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (rank == world.rank() || !texts[rank].starts_with(device)) continue;
    const std::string invitation = texts[rank].substr(device.size());
    try {
      peers_.push_back({SharedMemory::open(invitation, sizeof(Begun)), invitation});
    } catch (const Error& error) {
      if (error.code() != Code::no_transport) throw;
    }
  }
}

void DrivePeers::begin_record(std::size_t lane) {
  std::atomic<std::uint64_t>& own = begun(memory_)[lane];
  std::uint64_t mine = own.load();
  if (mine == has_left) return;
  for (Peer& peer : peers_) {
    if (mine % round_ == 0) wait_for(peer, lane, mine);
  }
  own.compare_exchange_strong(mine, mine + 1);  // unless this rank has left meanwhile
}

void DrivePeers::wait_for(Peer& peer, std::size_t lane, std::uint64_t mine) const {
  const std::atomic<std::uint64_t>&theirs = begun(peer.memory)[lane], &own = begun(memory_)[lane];
  const auto is_near = [&](std::uint64_t at) { return at >= mine - std::min(mine, round_ / 4); };
  const auto end = std::chrono::steady_clock::now() + patience_;
  for (std::uint64_t at = theirs.load(); !is_near(at) && at != peer.given_up[lane]; at = theirs.load()) {
    if (own == has_left) return;  // another lane of this rank has failed meanwhile
    if (std::chrono::steady_clock::now() > end || SharedMemory::is_gone(peer.invitation)) peer.given_up[lane] = at;
    std::this_thread::sleep_for(pause);
  }
}

void DrivePeers::leave() noexcept {
  for (std::atomic<std::uint64_t>& each : begun(memory_))
    each = has_left;
}

}  // namespace ballast

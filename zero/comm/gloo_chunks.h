// How many bytes ranks send at a time through Gloo, and how far ahead.
#pragma once

#include <algorithm>
#include <cstddef>

namespace ballast {

// Chunks that a rank sends ahead of those that it has received, so that the link does not wait for this rank: neither for its
// sums nor for the time that a message takes to a peer and back. As many of the next exchange may arrive before it begins here.
inline constexpr std::size_t sent_ahead = 4;
inline constexpr std::size_t expected_ahead = 2 * sent_ahead;

// A large chunk costs few wake-ups. A rank receives those of all peers into 16 MiB at most. From 64 peers on chunks become no
// smaller, so it takes 256 KiB for each peer.
inline std::size_t gloo_chunk_bytes(std::size_t ranks) {
  constexpr std::size_t least = std::size_t{32} << 10;
  constexpr std::size_t most = std::size_t{2} << 20;
  constexpr std::size_t received = std::size_t{16} << 20;
  const std::size_t peers = std::max<std::size_t>(ranks - 1, 1);
  return std::clamp(received / expected_ahead / peers, least, most) / 64 * 64;
}

}  // namespace ballast

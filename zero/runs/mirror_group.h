// Chooses on whose drives the records of each rank are mirrored. A pure function of the ranks' hosts, so every rank chooses the
// same.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace ballast {

// The ranks that mirror each other: of two hosts, or of three where hosts are odd in number. Each keeps the records of the one on
// the host before its own, and that of the first host those of the last one.
struct MirrorGroup {
  std::size_t number = 0;
  std::vector<std::size_t> ranks{};    // in order
  std::size_t mirrored = 0;            // the rank whose records this one keeps
  std::vector<std::size_t> on_host{};  // all ranks whose records this one's host keeps, or on one host may keep
};

// `hosts` names the host of each rank. On one host, each rank counts as a host of its own: a lost drive is survived, not the host.
// Throws B1005 for a single rank, and for hosts with different numbers of ranks.
MirrorGroup mirror_group_of(std::size_t rank, std::span<const std::string> hosts);

}  // namespace ballast

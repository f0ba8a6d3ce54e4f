#include "zero/comm/transport.h"

#include <iterator>
#include <set>

namespace ballast {

std::size_t ranks_per_host(std::span<const std::string> hosts) {
  std::size_t ranks = 1;
  while (ranks < hosts.size() && hosts[ranks] == hosts[0]) {
    ++ranks;
  }
  if (ranks == 1 || ranks == hosts.size() || hosts.size() % ranks != 0) return 1;
  std::set<std::string_view> seen;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const bool is_first = rank % ranks == 0;
    if (is_first ? !seen.insert(hosts[rank]).second : hosts[rank] != hosts[rank - 1]) return 1;
  }
  return ranks;
}

Transport::Transport(std::size_t rank, std::span<const std::string> hosts)
    : rank_(rank), ranks_per_host_(ballast::ranks_per_host(hosts)) {
  std::ranges::transform(hosts, std::back_inserter(is_here_),
                         [&](const std::string& host) { return host == hosts[rank]; });
  ranks_here_ = static_cast<std::size_t>(std::ranges::count(is_here_, true));
}

std::byte* Transport::scratch(std::size_t bytes) {
  scratch_.resize(std::max(scratch_.size(), bytes / sizeof(float)));
  return reinterpret_cast<std::byte*>(scratch_.data());
}

}  // namespace ballast

#include "zero/runs/mirror_group.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace ballast {
namespace {

using RanksOfHost = std::vector<std::size_t>;

// Returns the ranks of each host, in the order of the hosts' first ranks.
std::vector<RanksOfHost> by_host(std::span<const std::string> hosts) {
  std::vector<RanksOfHost> ranks;
  std::vector<std::string> names;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto host = static_cast<std::size_t>(std::ranges::find(names, hosts[rank]) - names.begin());
    if (host == names.size()) {
      names.push_back(hosts[rank]);
      ranks.emplace_back();
    }
    ranks[host].push_back(rank);
  }
  return ranks;
}

std::vector<RanksOfHost> each_alone(std::size_t ranks) {
  std::vector<RanksOfHost> hosts;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    hosts.push_back({rank});
  return hosts;
}

void require_mirrors(const std::vector<RanksOfHost>& hosts) {
  require(hosts.size() > 1, Code::unsupported, [] {
    return Problem{.what = "cannot mirror the run: it has one rank",
                   .needed = "a second rank, with directories of its own",
                   .remedy = "Leave out mirror, or train on several ranks."};
  });
  const auto other =
      std::ranges::find_if(hosts, [&](const RanksOfHost& ranks) { return ranks.size() != hosts.front().size(); });
  require(other == hosts.end(), Code::unsupported, [&] {
    return Problem{.what = "cannot mirror the run: hosts have different numbers of ranks",
                   .where = fmt::format("the hosts of rank {} and of rank {}", hosts.front().front(), other->front()),
                   .needed = fmt::format("{} ranks on each host", hosts.front().size()),
                   .available = fmt::format("{} ranks", other->size()),
                   .remedy = "Start as many ranks on each host, or leave out mirror."};
  });
}

// Hosts 0 and 1 are the first group, hosts 2 and 3 the second; the last three hosts are one where hosts are odd in number.
std::size_t group_of(std::size_t host, std::size_t hosts) { return std::min(host / 2, hosts / 2 - 1); }

}  // namespace

MirrorGroup mirror_group_of(std::size_t rank, std::span<const std::string> names) {
  std::vector<RanksOfHost> hosts = by_host(names);
  const bool is_one_host = hosts.size() == 1;
  if (is_one_host) hosts = each_alone(names.size());
  require_mirrors(hosts);
  const auto mirrored_on = [&](std::size_t host) -> const RanksOfHost& {
    const bool is_first = host == 0 || group_of(host - 1, hosts.size()) != group_of(host, hosts.size());
    if (!is_first) return hosts[host - 1];
    std::size_t last = host;
    while (last + 1 < hosts.size() && group_of(last + 1, hosts.size()) == group_of(host, hosts.size()))
      ++last;
    return hosts[last];
  };
  const auto own = static_cast<std::size_t>(
      std::ranges::find_if(hosts, [&](const RanksOfHost& ranks) { return std::ranges::count(ranks, rank) > 0; }) -
      hosts.begin());
  const auto place = static_cast<std::size_t>(std::ranges::find(hosts[own], rank) - hosts[own].begin());
  const std::size_t group = group_of(own, hosts.size());
  MirrorGroup found{
      .number = group * hosts[own].size() + place, .mirrored = mirrored_on(own)[place], .on_host = mirrored_on(own)};
  for (std::size_t host = 0; host < hosts.size(); ++host) {
    if (group_of(host, hosts.size()) == group) found.ranks.push_back(hosts[host][place]);
  }
  std::ranges::sort(found.ranks);
  if (is_one_host) {
    found.on_host.resize(names.size());
    std::iota(found.on_host.begin(), found.on_host.end(), std::size_t{0});
  }
  return found;
}

}  // namespace ballast

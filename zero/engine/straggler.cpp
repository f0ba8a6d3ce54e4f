#include "zero/engine/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace ballast {

Straggler find_straggler(Mesh& mesh, double own_seconds) {
  std::vector<std::int64_t> nanoseconds(mesh.ranks());  // by rank; the sums put them together
  nanoseconds[mesh.rank()] = static_cast<std::int64_t>(own_seconds * 1e9);
  mesh.reduce->all_reduce(nanoseconds);
  mesh.replicas->all_reduce(nanoseconds);
  const auto slowest = std::ranges::max_element(nanoseconds);
  Straggler straggler{.slowest = static_cast<std::size_t>(slowest - nanoseconds.begin()),
                      .seconds = static_cast<double>(*slowest) * 1e-9};
  std::ranges::sort(nanoseconds);
  straggler.median = static_cast<double>(nanoseconds[nanoseconds.size() / 2]) * 1e-9;
  straggler.least = static_cast<double>(nanoseconds.front()) * 1e-9;
  return straggler;
}

std::string to_text(const Straggler& straggler) {
  if (straggler.seconds == 0.0) return "ranks' own times are not measured: on a GPU, a timeline does it";
  return fmt::format("slowest rank {}: {:.1f} ms of its own, the median {:.1f} ms, the least {:.1f} ms",
                     straggler.slowest, straggler.seconds * 1e3, straggler.median * 1e3, straggler.least * 1e3);
}

}  // namespace ballast

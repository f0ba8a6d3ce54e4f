#include "zero/engine/tensor_sums.h"

#include <algorithm>

namespace ballast {

std::vector<LastingNorm> lasting_norms(const std::vector<Op>& list) {
  const auto agree = std::ranges::find(list, OpKind::agree, &Op::kind);
  std::vector<LastingNorm> norms;
  for (const Op& op : list) {
    if (op.kind != OpKind::norm) continue;
    LastingNorm& found = norms.emplace_back(LastingNorm{op});
    const auto download = std::ranges::find_if(
        list, [&](const Op& d) { return d.kind == OpKind::download && d.unit == op.unit && d.tile == none; });
    if (download == list.end() || download->from != op.from) continue;
    found.download = static_cast<std::size_t>(download - list.begin());
    found.norm.lane = Lane::host;
    found.norm.from = download->to;
    found.norm.to = agree->state;
  }
  return norms;
}

}  // namespace ballast

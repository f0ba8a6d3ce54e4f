#include "zero/plan/awaited.h"

#include <array>

namespace ballast {

std::vector<bool> awaited_in(const std::vector<Op>& list) {
  std::vector<bool> awaited(list.size());
  std::array<std::size_t, lane_count> last;
  last.fill(none);
  for (std::size_t i = 0; i < list.size(); ++i) {
    last[static_cast<std::size_t>(list[i].lane)] = i;
    if (list[i].is_marked) awaited[i] = true;
    for (const Wait& wait : list[i].after) {
      awaited[wait.op] = true;
    }
  }
  for (const std::size_t op : last) {
    if (op != none) awaited[op] = true;
  }
  return awaited;
}

}  // namespace ballast

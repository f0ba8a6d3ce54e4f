#include "zero/plan/shared_time.h"

#include <algorithm>

namespace ballast {

SharedTime::Taken SharedTime::take(std::size_t task, double from, double seconds) {
  Taken last{.begin = from, .end = from};
  auto next = std::ranges::upper_bound(taken_, from, {}, &Piece::end);
  while (seconds > 0) {
    const double free = next == taken_.end() ? seconds : std::min(seconds, next->begin - last.end);
    if (free > 0) {
      last.end += free;
      seconds -= free;
      next = taken_.insert(next, {last.begin, last.end, task}) + 1;
    } else {
      last = {.begin = next->end, .end = next->end, .after = next->task};
      ++next;
    }
  }
  return last;
}

}  // namespace ballast

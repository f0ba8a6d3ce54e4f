// Time on a processor that several tasks use in turn.
#pragma once

#include <cstddef>
#include <vector>

namespace ballast {

class SharedTime {
 public:
  static constexpr std::size_t no_task = static_cast<std::size_t>(-1);
  struct Taken {
    double begin = 0;  // of the last piece
    double end = 0;
    std::size_t after = no_task;  // the task that had the processor just before that piece; none if it was free
  };

  // Takes `seconds` of the time that is free from `from` on, in as many pieces as needed.
  Taken take(std::size_t task, double from, double seconds);

 private:
  struct Piece {
    double begin;
    double end;
    std::size_t task;
  };
  std::vector<Piece> taken_;  // in order of time
};

}  // namespace ballast

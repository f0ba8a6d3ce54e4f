// The operations in which all ranks take part, and for which others have to wait.
#pragma once

#include <utility>

#include "zero/plan/program.h"

namespace ballast {

class RankWaits {
 public:
  void begin_step() { agreed_ = none; }
  void set_agreed(std::size_t op) { agreed_ = op; }
  void set_committed(std::size_t op) { committed_ = op; }

  // Updates and writes wait for this.
  std::vector<std::size_t> agreement() const { return only(agreed_); }

  // The first operation of a step in which all ranks take part waits for this, ahead of all writes; it is empty for
  // later ones. Before a rank overwrites the generation before the last, all ranks must have committed the last one:
  // otherwise they might have no step in common.
  std::vector<std::size_t> take_last_commit() { return only(std::exchange(committed_, none)); }

 private:
  static std::vector<std::size_t> only(std::size_t op) {
    return op == none ? std::vector<std::size_t>{} : std::vector<std::size_t>{op};
  }

  std::size_t committed_ = none;
  std::size_t agreed_ = none;
};

}  // namespace ballast

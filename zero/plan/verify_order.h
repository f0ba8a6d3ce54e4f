// Finds which operations of a program are over before others begin, by waits and by the order of lanes.
#pragma once

#include <string>
#include <vector>

#include "zero/plan/program.h"

namespace ballast {

// The entry and two steps, in one list.
class Unrolled {
 public:
  explicit Unrolled(const Program& program);

  std::size_t size() const { return ops_.size(); }
  const Op& op(std::size_t index) const { return *ops_[index]; }
  std::string text(std::size_t index) const;  // "read of step 1, operation 7"

  // Waits that are wrong, and every two operations that touch the same bytes in no order while one of them writes.
  std::vector<std::string> races() const;

  // Writes before which it is not certain that all ranks have committed the step before.
  std::vector<std::string> early_writes() const;

 private:
  void add_waits(std::size_t index, const Op& op, std::size_t step_begin, std::size_t last_step);
  void follow_lanes();
  bool is_before(std::size_t a, std::size_t b) const { return before_[b][a]; }

  std::vector<const Op*> ops_;
  std::vector<std::size_t> in_step_;               // index of each in its step
  std::vector<std::size_t> step_;                  // 0: the entry
  std::vector<std::vector<std::size_t>> awaited_;  // directly
  std::vector<std::vector<bool>> before_;          // directly or through others
  std::vector<std::string> problems_;
};

}  // namespace ballast

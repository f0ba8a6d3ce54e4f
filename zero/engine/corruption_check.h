// Finds bits that memory, a drive or a unit of arithmetic got wrong. Every so many steps one tile's update is made a
// second time, on the CPU with another instruction set, and must give the same bits. The next update of that tile must
// find the bits that this one left, wherever they were stored in between. The tile changes each time.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "zero/engine/arithmetic.h"

namespace ballast {

class CorruptionCheck {
 public:
  // Checks a tile every `every` steps. `rank` is this rank's number among all, for messages. The plan outlives the
  // check.
  CorruptionCheck(const CompiledPlan& plan, std::size_t every, std::size_t rank);

  // Makes the update, on the thread of its lane. Bits that differ are an error (B3001).
  void update(const Op& op, const StepNumbers& step, const Arithmetic& arithmetic);

  void forget();              // any thread: the owner has changed what updates left
  std::size_t tiles() const;  // any thread: checked so far

 private:
  using Tile = std::pair<std::size_t, std::size_t>;  // unit, tile
  struct Copy {
    std::vector<std::byte> parameter{};
    std::vector<std::byte> state{};
  };

  bool is_next(const Tile& tile, std::uint64_t step) const;
  Copy copy_of(const Op& op, const Arithmetic& arithmetic) const;
  Copy updated(Copy copy, const Op& op, const StepNumbers& step, const Arithmetic& arithmetic) const;
  std::string first_difference(const Copy& expected, const Copy& found, std::size_t unit) const;
  void require_same(const Copy& expected, const Copy& found, const Op& op, std::uint64_t step, const char* what) const;

  const CompiledPlan& plan_;
  std::size_t every_;
  std::size_t rank_;
  std::vector<Tile> tiles_{};  // of this rank
  std::unique_ptr<kernels::Backend> backend_;
  mutable std::mutex mutex_;
  std::map<Tile, Copy> left_{};  // bits that checked updates left
  std::size_t checked_ = 0;
};

}  // namespace ballast

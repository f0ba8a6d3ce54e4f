// Finds bits that memory, a drive or a unit of arithmetic got wrong. Every so many steps the update of one tile, or of a
// stretch of a large one, is made a second time, on the CPU with another instruction set, and must give the same bits.
// The next update there must find the bits that this one left, wherever they were stored in between. The place changes
// each time.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "zero/engine/arithmetic.h"

namespace ballast {

class CorruptionCheck {
 public:
  // Checks a place every `every` steps. `rank` is this rank's number among all, for messages. The plan outlives the
  // check.
  CorruptionCheck(const CompiledPlan& plan, std::size_t every, std::size_t rank);

  // Makes the update, on the thread of its lane. Bits that differ are an error (B3001).
  void update(const Op& op, const StepNumbers& step, const Arithmetic& arithmetic);

  void forget();               // any thread: the owner has changed what updates left
  std::size_t places() const;  // any thread: checked so far

 private:
  struct Place {
    std::size_t unit = 0;
    std::size_t tile = 0;
    Range range{};  // elements of the tile

    bool is_in(const Op& op) const { return unit == op.unit && tile == op.tile; }
  };
  struct Copy {
    std::vector<std::byte> parameter{};
    std::vector<std::byte> state{};
  };

  const Place& next(std::uint64_t step) const { return places_[(step / every_) % places_.size()]; }
  bool is_next(const Place& place, std::uint64_t step) const { return step % every_ == 0 && &place == &next(step); }
  std::vector<const Place*> places_of(const Op& op, std::uint64_t step) const;
  const optim::StateLayout& layout_of(const Place& place) const { return plan_.blocks().state(place.unit, place.tile); }
  Copy expected_at(const Place& place, const Op& op, const StepNumbers& step, const Arithmetic& arithmetic);
  Copy copy_of(const Place& place, const Op& op, const Arithmetic& arithmetic) const;
  Copy updated(Copy copy, const Place& place, const Op& op, const StepNumbers& step,
               const Arithmetic& arithmetic) const;
  std::string first_difference(const Copy& expected, const Copy& found, const Place& place) const;
  void require_same(const Copy& expected, const Copy& found, const Place& place, std::uint64_t step,
                    const char* what) const;

  const CompiledPlan& plan_;
  std::size_t every_;
  std::size_t rank_;
  std::vector<Place> places_{};  // the places of this rank
  std::unique_ptr<kernels::Backend> backend_;
  mutable std::mutex mutex_;
  std::map<const Place*, Copy> left_{};  // bits that checked updates left
  std::size_t checked_ = 0;
};

}  // namespace ballast

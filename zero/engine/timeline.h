// What ran when: for Chrome's and Perfetto's trace viewers.
#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "zero/plan/machine.h"
#include "zero/plan/program.h"

namespace ballast {

// Each lane's entries are added by its own thread; read when the engine has finished.
class Timeline {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit Timeline(std::size_t most_entries = std::size_t{1} << 20);  // of a lane; what comes later is left out

  void add(const Op& op, Time begin, Time end);
  void add_wait(Phase phase, Time begin, Time end);  // the trainer's, in the row of the compute lane

  // A row for each lane. Traces of several ranks can be put into one viewer: each rank is a process there.
  std::string to_chrome_trace(const Model& model, std::size_t rank) const;

  // What the trainer computed with each unit, in the mean of its uses: for simulate().
  std::vector<UnitWork> work(std::size_t units) const;

 private:
  struct Entry {
    std::optional<OpKind> kind;  // none: the trainer waited
    std::size_t unit;
    std::size_t tile;
    Phase phase;
    Time begin;
    Time end;
  };
  void add(Lane lane, const Entry& entry);
  static std::string name_of(const Entry& entry, const Model& model);

  std::size_t most_entries_;
  std::array<std::vector<Entry>, lane_count> lanes_;
  Time start_ = std::chrono::steady_clock::now();
};

}  // namespace ballast

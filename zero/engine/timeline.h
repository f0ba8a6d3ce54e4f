// Which operation ran when, for the trace viewers of Chrome and Perfetto.
#pragma once

#include <ballast/planner.h>

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "zero/plan/program.h"

namespace ballast {

// Each lane adds its entries on its own thread. Read them after Engine::finish().
class Timeline {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit Timeline(std::size_t most_entries = std::size_t{1} << 20);  // of each lane; later ones are dropped

  void add(const Op& op, Time begin, Time end);
  void add_wait(Phase phase, Time begin, Time end);  // of the trainer, in the row of the compute lane

  // A row for each lane. A viewer can show several ranks together: each is a process of the trace.
  std::string to_chrome_trace(const Model& model, std::size_t rank) const;

  // The mean time of the trainer's uses of each unit, for simulate().
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

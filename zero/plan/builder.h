// Appends operations to a list and finds the earlier ones that each has to wait for: those that wrote the bytes it
// reads, and those that read or wrote the bytes it overwrites.
#pragma once

#include <map>

#include "zero/plan/program.h"

namespace ballast {

class Builder {
 public:
  explicit Builder(const std::vector<Slot>& slots);

  std::size_t add(Op op, const std::vector<std::size_t>& also_after = {});  // its index
  std::size_t size() const { return ops_.size(); }

  // The operations from `begin` on, as a step; the step before it begins at `last_step`. Waits for earlier operations
  // are left out, because those are over.
  std::vector<Op> step(std::size_t last_step, std::size_t begin) const;

 private:
  // Bytes with one history.
  struct Stretch {
    std::size_t end = 0;
    std::size_t writer = none;
    std::vector<std::size_t> readers_since{};
  };
  using History = std::map<std::size_t, Stretch>;  // the key is the first byte; no gaps

  History::iterator split(History& history, std::size_t at);
  void reads(const Piece& piece, std::vector<std::size_t>& after);
  void writes(const Piece& piece, std::vector<std::size_t>& after);
  void note_reader(std::vector<std::size_t>& readers);
  bool implies(std::size_t op, std::size_t earlier) const;
  void simplify(std::vector<std::size_t>& after) const;

  std::vector<Op> ops_;
  std::vector<std::vector<std::size_t>> after_;  // one for each operation, by index
  std::vector<History> history_;                 // one for each slot
};

}  // namespace ballast

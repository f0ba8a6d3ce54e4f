// Appends operations to a program and finds what each has to wait for: those that wrote what it reads, and those that read
// or wrote what it overwrites.
#pragma once

#include "zero/program.h"

namespace ballast {

class Builder {
 public:
  std::size_t slot(Slot slot);
  Piece whole(std::size_t slot) const { return {slot, 0, program_.slots[slot].count}; }
  std::size_t add(Op op);  // its index. What it waits for beyond its operands comes in op.after
  Program finish() && { return std::move(program_); }

 private:
  struct History {
    std::size_t writer = none;
    std::vector<std::size_t> readers_since{};
  };
  void reads(Op& op, const Piece& piece);
  void writes(Op& op, const Piece& piece);

  Program program_;
  std::vector<History> history_;  // by slot
};

}  // namespace ballast

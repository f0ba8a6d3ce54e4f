// Memory for records between steps: the slots into which a step reads them.
#pragma once

#include <algorithm>
#include <vector>

#include "offload/completion.h"
#include "zero/engine/slots.h"
#include "zero/plan/program.h"

namespace ballast {

// Pieces are used in turn: while one is on its way to its drive, the next one is filled.
class RecordMemory {
 public:
  RecordMemory(const Program& program, const Slots& slots) : slots_(slots) {
    for (const std::vector<Op>* ops : {&program.entry, &program.ops}) {
      for (const Op& op : *ops) {
        if (op.kind == OpKind::read && std::ranges::find(pieces_, op.to) == pieces_.end()) pieces_.push_back(op.to);
      }
    }
    require(!pieces_.empty(), Code::internal,
            [] { return Problem{.what = "a program with records does not read any"}; });
    written_.resize(pieces_.size());
  }
  RecordMemory(RecordMemory&&) = delete;
  ~RecordMemory() {  // no request may use the slots any more
    offload::InFlight under_way;
    for (const offload::Completion& write : written_) {
      under_way.add(write);
    }
  }

  std::span<std::byte> next() {
    const std::size_t number = used_++ % pieces_.size();
    written_[number].wait();
    return slots_.bytes(pieces_[number]);
  }

  // The piece that next() returned last.
  void is_written_by(const offload::Completion& write) { written_[(used_ - 1) % pieces_.size()] = write; }

  void finish() const {
    for (const offload::Completion& write : written_) {
      write.wait();
    }
  }

 private:
  const Slots& slots_;
  std::vector<Piece> pieces_{};
  std::vector<offload::Completion> written_{};
  std::size_t used_ = 0;
};

}  // namespace ballast

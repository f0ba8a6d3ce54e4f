// Memory for records between steps: the slots into which a step reads them.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "offload/completion.h"
#include "zero/engine/running_program.h"
#include "zero/engine/slots.h"

namespace ballast {

// Pieces are used in turn: while one is on its way to its drive, the next one is filled.
class RecordMemory {
 public:
  RecordMemory(std::vector<Piece> pieces, const Slots& slots) : slots_(slots), pieces_(std::move(pieces)) {
    require(!pieces_.empty(), Code::internal,
            [] { return Problem{.what = "a program with records has no memory for any"}; });
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
  std::vector<Piece> pieces_;
  std::vector<offload::Completion> written_{};
  std::size_t used_ = 0;
};

// Memory for both kinds of records.
class RecordsMemory {
 public:
  RecordsMemory(const RunningProgram& running, const Slots& slots) {
    const CompiledPlan& plan = running.plan();
    if (plan.tiles_on_drive() > 0) trained_.emplace(read_into(running.program()), slots);
    if (plan.frozen_on_drive() > 0) {
      frozen_.emplace(first_regions(running.program(), plan.blocks().records().of_parameters()), slots);
    }
  }

  RecordMemory& of(const Home& home) { return home.frozen ? *frozen_ : *trained_; }

  void finish() const {
    for (const std::optional<RecordMemory>* memory : {&trained_, &frozen_}) {
      if (*memory) (*memory)->finish();
    }
  }

 private:
  static std::vector<Piece> read_into(const Program& program) {
    std::vector<Piece> pieces;
    for (const std::vector<Op>* ops : {&program.entry, &program.ops}) {
      for (const Op& op : *ops) {
        if (op.kind == OpKind::read && std::ranges::find(pieces, op.to) == pieces.end()) pieces.push_back(op.to);
      }
    }
    return pieces;
  }

  static std::vector<Piece> first_regions(const Program& program, std::size_t bytes) {
    std::vector<Piece> pieces;
    const auto slot = std::ranges::find(program.slots, SlotRole::first_regions, &Slot::role);
    if (slot == program.slots.end()) return pieces;
    const auto number = static_cast<std::size_t>(slot - program.slots.begin());
    for (std::size_t begin = 0; begin + bytes <= slot->bytes; begin += bytes)
      pieces.push_back({number, begin, bytes});
    return pieces;
  }

  std::optional<RecordMemory> trained_{};
  std::optional<RecordMemory> frozen_{};
};

}  // namespace ballast

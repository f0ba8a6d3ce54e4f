// The slots of a program: everything that lives in memory between steps, and the buffers that operations take turns with.
#pragma once

#include <array>
#include <set>

#include "zero/plan/compile.h"

namespace ballast {

// Slots of one kind that are used in turn; or as many parts of one slot.
class Ring {
 public:
  Ring() = default;
  Ring(const Piece& first, std::size_t slots, bool in_one_slot = false)
      : first_(first), slots_(slots), in_one_slot_(in_one_slot) {}

  std::size_t slots() const { return slots_; }
  Piece at(std::size_t turn) const {
    const std::size_t number = turn % slots_;
    return in_one_slot_ ? Piece{first_.slot, number * first_.bytes, first_.bytes}
                        : Piece{first_.slot + number, 0, first_.bytes};
  }
  Piece next(std::size_t bytes) { return next().part(0, bytes); }
  Piece next() { return at(turn_++); }
  void restart() { turn_ = 0; }

 private:
  Piece first_{};
  std::size_t slots_ = 0;
  bool in_one_slot_ = false;
  std::size_t turn_ = 0;
};

// A unit's slots between steps; `none` where it has no such thing.
struct UnitSlots {
  std::size_t parameters = none;  // on the device: whole, or this rank's shard of both sections, one after the other
  std::size_t frozen = none;      // on the host: this rank's shard of the frozen section
  std::size_t gradients = none;   // whole, where a step's micro-steps are summed in them
  std::size_t reduced = none;     // this rank's summed gradients, fp32
  std::vector<Piece> state{};     // by tile, on the device
  std::vector<Piece> blocks{};    // by tile, on the host: parameter and state
  std::vector<Piece> copies{};    // by tile, on the host: the parameter of a tile whose record is on a drive
};

class StepSlots {
 public:
  StepSlots(const CompileInput& input, const Trace& trace, const Uses& uses);

  const std::vector<Slot>& all() const { return all_; }
  const UnitResidence& residence(std::size_t unit) const { return residence_[unit]; }
  const UnitSlots& of(std::size_t unit) const { return units_[unit]; }

  // Whether a unit's whole parameters are there only from a gather to the end of its use.
  bool comes_and_goes(std::size_t unit) const { return comes_and_goes_[unit]; }
  std::size_t whole_bytes(std::size_t unit) const;
  std::size_t shard_bytes(std::size_t unit) const;  // of reduced gradients, fp32
  std::size_t gathered_slot() const { return gathered_; }
  std::size_t gathered_bytes() const { return all_[gathered_].bytes; }
  const Piece& norm(Tier tier) const { return norms_[static_cast<std::size_t>(tier)]; }  // of gradients in this tier

  void restart();  // all rings: every round uses them alike

  Ring gradients;           // device: of one backward use
  Ring partial;             // device: summed over the shard group, not yet over the replicas
  Ring arriving;            // device: summed gradients on their way to where they are kept
  Ring landed;              // host: the same, to be added there
  Ring tile_gradients;      // host: a tile's gradient, for an update on the host
  Ring tile_parameters;     // host: the same of its parameter, if its record has none
  Ring first_regions;       // host: first regions of records
  Ring staging;             // host: records on their way
  std::vector<Piece> kept;  // host: records that stay

 private:
  // What the rings are for, over all units.
  struct Needs {
    std::size_t gradient_bytes = 0;
    std::size_t shard_bytes = 0;
    std::size_t tile_gradient_bytes = 0;
    std::size_t tile_parameter_bytes = 0;
    std::size_t records = 0;
    bool arriving = false;
    bool landed = false;
    bool first_regions = false;
  };
  Needs needs() const;
  std::size_t add(std::string name, Tier tier, std::size_t bytes, SlotRole role = SlotRole::buffer);
  Ring add_ring(std::string_view name, Tier tier, std::size_t slots, std::size_t bytes);
  Ring add_records(std::string_view name, std::size_t records, std::size_t bytes);
  void add_unit(std::size_t unit);
  void add_tiles(std::size_t unit);
  void add_rings(std::size_t held_together);
  std::size_t longest_chain(const Trace& trace, const Uses& uses) const;
  void add_gathered(const Trace& trace, const Uses& uses);
  void add_norms();
  std::size_t bytes_for_prefetch(const Trace& trace, const Uses& uses) const;
  std::size_t bytes_gathered(const std::set<std::size_t>& units) const;

  const CompileInput& in_;
  std::vector<UnitResidence> residence_;
  std::vector<bool> comes_and_goes_;  // by unit
  std::vector<std::size_t> sums_;     // by unit: what a step's gradients are made of
  std::vector<Slot> all_;
  std::vector<UnitSlots> units_;
  std::size_t gathered_ = none;
  std::array<Piece, tier_count> norms_;  // by tier
};

}  // namespace ballast

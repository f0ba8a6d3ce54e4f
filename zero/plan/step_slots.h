// The slots of a program: everything that lives in memory between steps, and the buffers that operations take turns
// with.
#pragma once

#include <array>

#include "zero/plan/compile_input.h"
#include "zero/plan/matrix_homes.h"

namespace ballast {

// Full parameters that are gathered begin at multiples of this, for GPUs and wide CPU instructions.
inline constexpr std::size_t gathered_alignment = 256;

// Buffers of one kind that operations use in turn: slots of equal size, or as many parts of one slot.
class Ring {
 public:
  Ring() = default;
  Ring(const Piece& first, std::size_t slots, bool in_one_slot = false)
      : first_(first), slots_(slots), in_one_slot_(in_one_slot) {}

  std::size_t slots() const { return slots_; }
  Piece at(std::size_t turn) const {
    const std::size_t index = turn % slots_;
    return in_one_slot_ ? Piece{first_.slot, index * first_.bytes, first_.bytes}
                        : Piece{first_.slot + index, 0, first_.bytes};
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

// The list of a program's slots while it grows.
class SlotList {
 public:
  const std::vector<Slot>& all() const { return all_; }

  std::size_t add(SlotRole role, Tier tier, std::size_t bytes, std::string_view which = {});  // its index
  Ring add_ring(SlotRole role, Tier tier, std::size_t slots, std::size_t bytes);

  // All records in one slot of full huge pages, on the host.
  Ring add_records(SlotRole role, std::size_t records, std::size_t bytes);

  // Pieces of one slot for those of a unit's tiles whose state lies in one tier; none for the others.
  struct TilePieces {
    SlotRole role;
    Tier tier;        // the tier of the slot
    Tier state_tier;  // the tier of the tiles that get a piece
    std::size_t bytes = 0;
  };
  std::vector<Piece> add_pieces(const TilePieces& pieces, const std::vector<Tier>& state, std::string_view which);

 private:
  std::vector<Slot> all_;
};

// A unit's slots between steps; `none` where it has no such thing.
struct UnitSlots {
  // The slot on the device: full parameters, or this rank's shard of both sections, one after the other.
  std::size_t parameters = none;
  std::size_t frozen = none;  // the slot on the host, if parameters are there: this rank's shard of the frozen section
  std::size_t gradients = none;  // full, where a step's micro-steps are summed in them
  std::size_t reduced = none;    // this rank's summed gradients
  std::vector<Piece> state{};    // one for each tile, on the device
  std::vector<Piece> blocks{};   // one for each tile, on the host: parameter and state
  std::vector<Piece> copies{};   // one for each tile, on the host: the parameter of a tile whose record is on a drive
};

// The buffers of a step.
struct StepRings {
  Ring gradients{};        // device: of one backward use
  Ring partial{};          // device: summed over the shard group, not yet over the replicas
  Ring arriving{};         // device: summed gradients on their way to where they are kept
  Ring landed{};           // host: the same, to be added there
  Ring tile_gradients{};   // host: a tile's gradient, for an update on the host
  Ring tile_parameters{};  // host: the same of its parameter, if its record has none
  Ring tile_directions{};  // host: the same of its direction, for a rule of whole matrices
  Ring directions{};       // device: of all of a unit's tiles
  Ring matrices{};         // device: the whole matrices of this rank
  Ring first_regions{};    // host: first regions of records
  Ring staging{};          // host: records on their way

  void restart();  // every step uses them in the same way
};

class StepSlots {
 public:
  StepSlots(const CompileInput& input, const Uses& uses);

  const std::vector<Slot>& all() const { return slots_.all(); }
  const UnitResidence& residence(std::size_t unit) const { return residence_[unit]; }
  const UnitSlots& of(std::size_t unit) const { return units_[unit]; }
  std::vector<Home> homes() const;  // the memory in which parameters and state lie between steps

  // Whether a unit's full parameters are there only from a gather to the end of its use.
  bool is_gathered_per_use(std::size_t unit) const { return is_gathered_per_use_[unit]; }
  std::size_t full_bytes(std::size_t unit) const;
  std::size_t shard_bytes(std::size_t unit) const;    // bytes of reduced gradients
  std::size_t partial_bytes(std::size_t unit) const;  // bytes of gradients that are not summed over the replicas yet
  // The codes of a gather per use; none if it is exact.
  Codes gather_codes(std::size_t unit, const Section& section) const;
  Codes reduce_codes(std::size_t unit, Ranks ranks) const;  // the same of a reduction
  std::size_t gathered_slot() const { return gathered_; }
  std::size_t gathered_bytes() const { return gathered_ == none ? 0 : all()[gathered_].bytes; }
  // Whether a unit's sum is complete when it arrives on the device, on its way to the host: its squares are added there,
  // before they pass the slower link and wait for the CPU.
  bool is_normed_on_its_way(std::size_t unit) const {
    return residence_[unit].gradients == Tier::host && !in_.host_is_device && sums_[unit] == 1;
  }
  // The tier where the program adds a unit's sum to the norm.
  Tier norm_tier(std::size_t unit) const {
    return is_normed_on_its_way(unit) ? Tier::device : residence_[unit].gradients;
  }
  // The norm of sums in this tier.
  const Piece& norm(Tier tier) const { return norms_[static_cast<std::size_t>(tier)]; }
  const std::vector<Piece>& kept() const { return kept_; }  // host: records that stay in memory

  // Only a rule of whole matrices has them.
  const UnitMatrices& matrices(std::size_t unit) const { return matrices_[unit]; }
  const Piece& workspace() const { return workspace_; }
  // Units whose updates are under way at once: the products of one, while those of the next are prepared.
  std::size_t updates_at_once() const { return in_.needs_matrices() && !in_.schedule.update_in_backward ? 2 : 1; }

  StepRings rings;

 private:
  // The needs of rings and records, over all units.
  struct Needs {
    std::size_t gradient_bytes = 0;
    std::size_t shard_bytes = 0;
    std::size_t partial_bytes = 0;
    std::size_t tile_gradient_bytes = 0;
    std::size_t tile_parameter_bytes = 0;
    std::size_t records = 0;
    std::array<std::size_t, 2> records_of_units{};  // bytes on a drive of the two units that have the most
    std::size_t directions = 0;
    std::size_t tile_directions = 0;
    std::size_t matrices = 0;
    std::size_t workspace = 0;
    bool arriving = false;
    bool landed = false;
    bool first_regions = false;
  };

  void add_unit(std::size_t unit);
  void add_tiles(std::size_t unit);
  void add_gathered(const Uses& uses);
  Needs needs() const;
  void add_needs(std::size_t unit, Needs& needs) const;
  void add_needs_of_matrices(std::size_t unit, Needs& needs) const;
  void add_rings(const Needs& needs, std::size_t held_together);
  void add_matrices(const Needs& needs);
  void add_records(const Needs& needs);
  void add_norms();
  void add_norm(Tier tier);
  void add_codes();
  void add_memory_of_reductions();
  void add_kept_parameters(std::size_t unit, std::vector<Home>& homes) const;
  void add_frozen_tiles(std::size_t unit, std::vector<Home>& homes) const;
  Home home_of_tile(std::size_t unit, std::size_t tile) const;

  const CompileInput& in_;
  std::vector<UnitResidence> residence_;
  std::vector<bool> is_gathered_per_use_;  // one for each unit
  std::vector<std::size_t> sums_;          // each unit's reductions that make up a step's gradients
  SlotList slots_;
  std::vector<UnitSlots> units_;
  std::size_t gathered_ = none;
  std::size_t gather_codes_ = none;
  std::size_t reduce_codes_ = none;
  std::vector<UnitMatrices> matrices_;  // one for each unit
  Piece workspace_{};
  std::vector<Piece> kept_;
  std::array<Piece, tier_count> norms_;  // one for each tier
};

}  // namespace ballast

// The parts of the compiler of a step: its slots, its list of operations, and what each part emits.
#pragma once

#include <array>
#include <compare>
#include <map>
#include <optional>

#include "zero/plan/compile_input.h"
#include "zero/plan/matrix_homes.h"
#include "zero/plan/program.h"

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

// The slots of a program: everything that lives in memory between steps, and the buffers that operations take turns with.
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

// Appends operations to a list and finds the earlier ones that each has to wait for: those that wrote the bytes it
// reads, and those that read or wrote the bytes it overwrites.
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

// The input and facts about it, the slots, and the list of operations that the parts add to.
struct CompileContext {
  // Operations are emitted for `followed`, in the slots of the program that follows `program_uses`.
  CompileContext(const CompileInput& in, const Uses& program_uses, const Uses& followed, bool is_off_plan)
      : input(in), uses(followed), slots(in, program_uses), builder(slots.all()), off_plan(is_off_plan) {}
  CompileContext(const CompileContext&) = delete;

  const CompileInput& input;
  const Uses uses;
  StepSlots slots;
  Builder builder;
  bool off_plan = false;  // the uses to come are unknown, so nothing is done ahead
  // The step's agreement, or off plan the rendezvous of all ranks, if it has come: updates and writes wait for it.
  std::vector<std::size_t> agreement{};
  // The commit of the last step, until the first operation of a step in which all ranks take part takes it, ahead of all writes.
  // Before a rank overwrites the generation before the last, all ranks must have committed the last one: otherwise they might
  // have no step in common.
  std::vector<std::size_t> last_commit{};

  const Trace& trace() const { return uses.trace(); }
  std::size_t units() const { return input.model.units.size(); }
  std::size_t width(std::size_t unit) const { return input.width(unit); }
  std::size_t width_of_sums(std::size_t unit) const { return input.width_of_sums(unit); }
  const UnitLayout& layout(std::size_t unit) const { return input.layout.units[unit]; }
  const UnitResidence& residence(std::size_t unit) const { return slots.residence(unit); }
};

struct TileName {
  std::size_t unit = 0;
  std::size_t tile = 0;

  auto operator<=>(const TileName&) const = default;  // NOLINT(modernize-use-nullptr): a false alarm
};

// The records of a step on their way through memory: read ahead, updated where they lie, written back in the same
// order.
class RecordStream {
 public:
  // `units`: as the program updates them. The first of their tiles on drives stay in memory, as many as slots are kept for.
  RecordStream(CompileContext& context, const std::vector<std::size_t>& units);

  bool any() const { return any_; }
  void read_kept();  // called before the first step
  void begin_step();
  void follow(const std::vector<std::size_t>& units);  // another order in this step

  Piece next();       // where the next tile's record lies: reads it, and some ahead
  void write_back();  // the oldest record that next() gave
  // Returns its newest write, in this step or the last, if there is one.
  std::vector<std::size_t> written(const TileName& name) const;

 private:
  void read(const TileName& name, const Piece& to);
  void read_ahead();

  CompileContext& context_;
  std::vector<TileName> order_;  // the tiles on drives
  bool any_ = false;
  std::map<TileName, Piece> kept_;        // records that stay in memory
  std::map<std::size_t, Piece> staging_;  // the key is the index in order_
  std::map<TileName, std::size_t> written_;
  std::size_t tiles_read_ = 0;
  std::size_t tiles_taken_ = 0;  // tiles that next() took
  std::size_t tiles_updated_ = 0;
  std::size_t staged_ = 0;  // records in the staging slots
};

// The units that are gathered at one time, and their position in the memory for them. The order of all uses is known,
// so Belady's rule decides: the unit whose next use is farthest away is dropped.
class GatheredUnits {
 public:
  struct Extent {
    std::size_t unit = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
    bool exact = false;  // see Visit::exact
  };

  GatheredUnits(std::size_t bytes, const Uses& uses) : bytes_(bytes), uses_(uses) {}

  std::optional<Extent> find(std::size_t unit) const;  // none: it is not gathered

  // Makes room for a unit that is used at `position`, by dropping units that are used later. Drops nothing and returns
  // false if the units that are used between `now` and then leave no room.
  bool make_room(std::size_t unit, std::size_t bytes, std::size_t now, std::size_t position);

  bool has_gap(std::size_t bytes) const;  // whether there is room while all units stay

  void drop(std::size_t unit);
  void clear() { extents_.clear(); }

 private:
  std::size_t bytes_;
  const Uses& uses_;
  std::vector<Extent> extents_;  // sorted by their place in memory
};

// Emits the operations that bring full parameters to the device, reads of records, uploads and gathers; knows where they are.
class ParameterGathers {
 public:
  // `records` says which write a read of the same record has to wait for.
  ParameterGathers(CompileContext& context, const RecordStream& records)
      : context_(context), records_(records), gathered_(context.slots.gathered_bytes(), context.uses) {}

  Piece full(std::size_t unit) const;  // a unit's parameters, if they are gathered
  // What a tile updates of the parameters that the device keeps.
  Piece kept_tile(std::size_t unit, std::size_t tile) const;

  // Gathers a unit for its use at `position`, unless it is gathered already. Returns false if the units that are used
  // between `now` and then leave no memory. This unit is one of them if only one of its two uses is exact.
  bool ensure_gathered(std::size_t unit, std::size_t now, std::size_t position);

  // Whether a unit is gathered, or can be while all others stay.
  bool has_spare_memory(std::size_t unit) const;

  // Gathers the units that are held together from `position` on, and drops others if necessary. Throws B2004 if they do
  // not fit.
  void ensure_chain_gathered(std::size_t position);

  void prefetch(std::size_t micro_step, std::size_t position);

  // Gathers what is kept of a unit's parameters beyond this rank's shard, which all ranks need each other's updates for.
  void gather_kept(std::size_t unit);
  void gather_kept_frozen(std::size_t unit);  // once: they do not change

  void drop(std::size_t unit) { gathered_.drop(unit); }  // its parameters have changed, or soon will
  void drop_all() { gathered_.clear(); }

 private:
  // A range of the full parameters. Of a section: this rank's shard in them; what the device keeps between uses, and this rank's
  // shard in that.
  Piece full(std::size_t unit, const Range& range) const;
  Piece shard(std::size_t unit, const Section& section) const;
  Piece kept(std::size_t unit, const Section& section) const;
  Piece kept_shard(std::size_t unit, const Section& section) const;

  void gather(std::size_t unit, const Visit& visit);
  void gather_replica(std::size_t unit, const Section& section);
  void upload_shard(std::size_t unit, Phase phase);
  void upload_tile(std::size_t unit, std::size_t tile, Phase phase);
  void fetch(const TileName& name, Phase phase, const Piece& to);
  std::size_t chain_bytes(std::size_t position) const;

  CompileContext& context_;
  const RecordStream& records_;
  GatheredUnits gathered_;
};

// Emits the operations on gradients: these clear memory for them, sum them over the ranks and uses, and add their
// squares to the norm.
class GradientSums {
 public:
  explicit GradientSums(CompileContext& context) : context_(context) { begin_step(); }

  void begin_step();

  // Clears memory for the gradients of the use at `position`, and in backward of the next use that has gradients, so that no use
  // waits for it.
  void prepare(std::size_t position);
  Piece use_gradients(std::size_t position) const;  // where a backward use adds its gradients; nowhere if it has none

  void add_use(std::size_t position, bool complete);  // sums them after the use; complete: they are all of the step's
  // Returns whether the sum is in the norm already; otherwise norm() adds it when it is complete.
  bool sum(std::size_t unit, const Piece& gradients, bool complete = false);
  void norm(std::size_t unit);
  void clear_norms();

  const Piece& summed(std::size_t unit) const { return summed_[unit]; }
  void take_over(std::size_t unit);  // a backward use of this step that other operations have summed

 private:
  bool has_gradients(std::size_t position) const;
  void prepare_use(std::size_t position);
  void clear(std::size_t unit, const Piece& gradients);
  void reduce(std::size_t unit, std::size_t number, const Piece& gradients, const Piece& to);
  void add_norm(std::size_t unit, const Piece& sum, Tier tier);
  bool is_boundary() const { return context_.input.placement.reduction == Reduction::boundary; }
  std::size_t bytes_of(std::size_t unit) const { return context_.layout(unit).trained.count() * context_.width(unit); }

  CompileContext& context_;
  std::map<std::size_t, Piece> uses_;   // the key is the position: cleared for a backward use to come
  std::vector<std::size_t> sums_done_;  // one for each unit
  std::vector<Piece> summed_;           // one for each unit
};

// Emits the update of a unit, tile by tile, in whichever tier their state lies. A rule of whole matrices updates in two parts:
// directions of the unit's tiles go to the ranks that orthogonalize them, and come back to move the parameters. With one rank
// nothing moves.
class UnitUpdates {
 public:
  UnitUpdates(CompileContext& context, const ParameterGathers& parameters, const GradientSums& gradients,
              RecordStream& records)
      : context_(context), parameters_(parameters), gradients_(gradients), records_(records) {}

  // Updates end in the order in which they begin. Between the two of one unit, another one may begin, if the slots have memory
  // for both: the directions of that are collected while the products of the first are computed.
  void begin(std::size_t unit);
  void end(std::size_t unit);

  // Leaves a unit without gradients as it is, but writes its records, because the next generation needs them too.
  void carry_over(std::size_t unit);

 private:
  // What a tile keeps on the host.
  struct Block {
    Piece memory{};
    BlockSizes sizes{};

    Piece state() const { return memory.part(sizes.parameter, sizes.state); }
  };
  // What a tile is updated from, and the buffers that bring it to the host.
  struct Source {
    Piece values{};
    Tier tier = Tier::device;
    Ring& on_its_way;
  };
  // An update by whole matrices that has begun: its memory, and the blocks of the unit's tiles.
  struct Begun {
    Piece directions{};  // directions of the unit's tiles, on the device
    Piece matrices{};
    std::vector<Block> blocks{};
  };

  void orthogonalize(std::size_t unit, const Begun& update);
  void make_direction(const TileName& name, const Block& block, const Piece& direction);
  void update_tile(const TileName& name, const Block& block, const Source& from);
  void update_on_host(const TileName& name, const Block& block, const Source& from);
  Block block_of(const TileName& name);  // none on the device; reads a record
  Source gradient_of(const TileName& name) const;
  Piece direction_of(const TileName& name, const Piece& directions) const;
  Piece on_host(const TileName& name, const Source& source) const;
  Piece kept_apart(const TileName& name) const;
  void move(OpKind kind, Lane lane, const TileName& name, const Piece& from, const Piece& to) const;
  std::size_t tiles(std::size_t unit) const { return context_.layout(unit).tiles.size(); }
  bool needs_matrices(std::size_t unit) const { return context_.input.needs_matrices() && tiles(unit) > 0; }

  CompileContext& context_;
  const ParameterGathers& parameters_;
  const GradientSums& gradients_;
  RecordStream& records_;
  std::map<std::size_t, Begun> begun_;  // the key is the unit
};

}  // namespace ballast

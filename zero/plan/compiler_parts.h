// The parts of the compiler of a step: the data that they share, and what each of them emits.
#pragma once

#include <compare>
#include <map>
#include <optional>

#include "zero/plan/builder.h"
#include "zero/plan/step_slots.h"

namespace ballast {

// The input and facts about it, the slots, and the list of operations that the parts add to.
struct CompileContext {
  // Operations are emitted for `followed`, in the slots of the program that follows `of_program`.
  CompileContext(const CompileInput& in, const Uses& of_program, const Uses& followed, bool is_off_plan)
      : input(in), uses(followed), slots(in, of_program), builder(slots.all()), off_plan(is_off_plan) {}
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
  Piece of_use(std::size_t position) const;  // where a backward use adds its gradients; nowhere if it has none

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

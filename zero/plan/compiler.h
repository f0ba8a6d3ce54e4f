// The compiler's parts share this; everybody else includes compile.h.
#pragma once

#include <map>
#include <tuple>

#include "zero/plan/builder.h"
#include "zero/plan/gathered_units.h"
#include "zero/plan/step_slots.h"

namespace ballast {

class Compiler {
 public:
  Compiler(const CompileInput& input, const Trace& trace) : Compiler(input, trace, trace) {}
  // What is emitted follows `trace`, with the slots of a program that follows another one.
  Compiler(const CompileInput& input, const Trace& of_program, const Trace& trace);

  Program run() &&;
  Program outline() const;
  std::vector<Op> rest_of_visits(const DepartedRound& round) &&;  // of the trace, beyond the round's
  std::vector<Op> rest_of_step(const DepartedRound& round) &&;

 private:
  struct TileName {
    std::size_t unit = 0;
    std::size_t tile = 0;
    bool operator<(const TileName& other) const { return std::tie(unit, tile) < std::tie(other.unit, other.tile); }
  };

  // compile.cpp: where things are, and how parameters come to them.
  std::vector<std::size_t> order_of_updates(const Uses& uses) const;
  std::vector<TileName> tiles_on_drive(const std::vector<std::size_t>& units) const;
  std::vector<Home> homes() const;
  void add_kept_parameters(std::size_t unit, std::vector<Home>& homes) const;
  Home home_of_tile(std::size_t unit, std::size_t tile) const;
  void entry();
  void begin_round();
  void round();
  std::size_t width(std::size_t unit) const;
  Piece whole_parameters(std::size_t unit) const;
  Piece section(std::size_t unit, const Section& section) const;     // of the whole parameters
  Piece own_shard(std::size_t unit, const Section& section) const;   // this rank's part of that
  Piece kept_shard(std::size_t unit, const Section& section) const;  // where the device keeps that between uses
  bool bring(std::size_t unit, std::size_t now, std::size_t position);
  void gather(std::size_t unit, Phase phase);
  void upload_shard(std::size_t unit, Phase phase);
  void fetch(const TileName& name, Phase phase, const Piece& to);

  // compile_uses.cpp: forward and backward, up to the summed gradients.
  void visit(std::size_t micro_step, std::size_t position);
  void bring_chain(std::size_t position);
  void prefetch(std::size_t micro_step, std::size_t position);
  void prepare_gradients(std::size_t position);
  void clear(std::size_t unit, const Piece& gradients);
  bool is_complete(std::size_t micro_step, std::size_t position) const;
  void after_backward(std::size_t micro_step, std::size_t position, const Piece& gradients);
  void sum(std::size_t unit, const Piece& gradients);
  void reduce(std::size_t unit, const Piece& gradients, const Piece& to);
  void norm(std::size_t unit);
  std::vector<std::size_t> waits_for_last_commit();

  // compile_step.cpp: from the norm to the next step's first gathers.
  void step();
  void update(std::size_t unit);
  void update_tile(std::size_t unit, std::size_t tile);
  void update_on_host(std::size_t unit, std::size_t tile, const Piece& block, const BlockSizes& sizes);
  Piece kept_beside_block(std::size_t unit, std::size_t tile) const;
  void carry_over(std::size_t unit);
  void read_ahead();
  void write_back(const Piece& record);
  std::vector<std::size_t> waits_for_agreement() const;
  void gather_whole(std::size_t unit);
  void hoist();

  // compile_departures.cpp: a round that has left the program's order.
  void take_over(const DepartedRound& round);
  void meet(Phase phase, std::size_t unit);
  bool can_wait(std::size_t unit) const;
  void require_old(const Visit& visit) const;
  void clear_norms();

  const CompileInput& in_;
  const Trace& of_program_;
  const Trace& trace_;
  Uses uses_;
  StepSlots slots_;
  std::vector<TileName> on_drive_;  // in the order of their updates: those still to come
  std::map<TileName, Piece> kept_;  // records that stay in memory
  bool has_records_;
  bool departed_ = false;  // nothing is known of what comes next
  Builder builder_;
  GatheredUnits gathered_;

  // Of the round that is being emitted, unless it says otherwise.
  std::map<std::size_t, Piece> gradients_;  // by position: cleared for a backward visit to come
  std::vector<std::size_t> sums_done_;      // by unit
  std::vector<Piece> summed_;               // by unit
  std::size_t committed_ = none;            // operation: the newest commit, of the round before until this one's comes
  std::size_t agreed_ = none;               // operation that updates and writes wait for; none where there is none
  std::vector<bool> current_;               // by unit: its parameters are the next step's
  std::size_t tiles_read_ = 0;              // of those on drives
  std::size_t tiles_updated_ = 0;
  std::map<std::size_t, Piece> staging_;     // by number in on_drive_
  std::map<TileName, std::size_t> written_;  // operation: the newest write, of the round before until this one's comes
  std::size_t hoisted_ = 0;                  // visits of the next step
};

}  // namespace ballast

// Shows and changes the state that a rank keeps between steps, tile by tile, and large tiles by stretches.
#pragma once

#include <ballast/local_state.h>

#include "zero/engine/home_memory.h"
#include "zero/engine/mesh.h"
#include "zero/engine/record_lane.h"
#include "zero/engine/record_memory.h"

namespace ballast {

// Used by the trainer's thread between steps, when nothing is under way.
class StateVisitor {
 public:
  // All of it outlives this.
  struct Parts {
    const RunningProgram& running;
    const Slots& slots;
    const HomeMemory& homes;
    Mesh& mesh;
    const RecordLane* records = nullptr;  // null: no tile is on a drive
  };
  explicit StateVisitor(const Parts& parts) : parts_(parts) {}

  std::vector<LocalTile> tiles() const;  // listed in the order in which they are visited; without their memory
  void look(const TileVisitor& visit, const TileFilter& which) const;

  // Tiles on drives are written, and committed after `agree` as the state that `committed` returns then: `agree` may set it.
  // All ranks of a run change its state together; if one fails, none changes its records: it throws its own error, the
  // others B3301.
  void change(const TileVisitor& visit, const std::function<void()>& agree,
              const std::function<CommittedState()>& committed) const;

 private:
  struct Memory {
    RecordMemory& records;
    Staging& staging;
  };

  std::vector<Home> local_homes() const;
  std::size_t largest_bytes(const TileFilter& which) const;
  void visit_tiles(const TileVisitor& visit, bool changes, const TileFilter& which) const;
  TileMemory frozen_memory(const Home& home, std::byte* parameter) const;
  void visit_frozen(const Home& home, const TileVisitor& visit, bool changes, Staging& staging) const;
  void visit_memory(const Home& home, const TileVisitor& visit, bool changes, Staging& staging) const;
  void visit_record(const Home& home, const TileVisitor& visit, bool changes, const Memory& memory) const;
  void do_on_all_ranks(const std::function<void()>& work) const;
  const CompiledPlan& plan() const { return parts_.running.plan(); }

  Parts parts_;
};

}  // namespace ballast

// Begins, shows and changes what a rank keeps between steps.
#pragma once

#include <ballast/local_state.h>

#include "zero/engine/home_memory.h"
#include "zero/engine/mesh.h"
#include "zero/engine/record_lane.h"

namespace ballast {

// Used by the trainer's thread: clear_device_memory(), initialize() and resume() before the program's entry is run, the others
// between steps, when nothing is under way.
class LocalState {
 public:
  // All of it outlives this.
  struct Parts {
    const RunningProgram& running;
    const Slots& slots;
    const LaneArithmetic& arithmetic;
    const HomeMemory& homes;
    Mesh& mesh;
    const RecordLane* records = nullptr;  // null: no tile is on a drive
  };
  explicit LocalState(const Parts& parts) : parts_(parts) {}

  void clear_device_memory() const;  // the host's is clear from the beginning

  // Optimizer state begins at zero; records are written, and committed as step 0.
  void initialize(const ParameterSource& source) const;

  // Reads everything that is trained from the records of the newest committed step, and returns its number. Frozen parameters
  // come from their source again, in each tier.
  std::uint64_t resume(const ParameterSource& frozen) const;

  // Tiles, and large ones in stretches, listed in the order in which they are visited; without their memory.
  std::vector<LocalTile> tiles() const;
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

  void load(std::size_t unit, const Range& range, const View& to, const ParameterSource& source) const;
  void fill_home(const Home& home, const ParameterSource& source, Staging& staging) const;
  void fill_on_host(const Home& home, const ParameterSource& source, Staging& staging) const;
  void begin_on_gpu(const Home& tile) const;
  void upload(const Home& home, const Range& range, const ParameterSource& source, Staging& staging) const;
  void fill_record(const Home& home, const ParameterSource& source, RecordMemory& memory) const;
  void fill_frozen(const Home& home, const ParameterSource& frozen, Staging& staging) const;
  void read_home(const Home& home, RecordMemory& memory, Staging& staging) const;
  std::size_t unwritten_bytes(const Home& home) const;
  Staging staging() const;  // memory that brings parameters to a GPU

  std::vector<Home> local_homes() const;
  std::size_t largest_bytes(const TileFilter& which) const;
  void visit_tiles(const TileVisitor& visit, bool changes, const TileFilter& which) const;
  TileMemory frozen_memory(const Home& home, std::byte* parameter) const;
  void visit_frozen(const Home& home, const TileVisitor& visit, bool changes, Staging& staging) const;
  void visit_memory(const Home& home, const TileVisitor& visit, bool changes, Staging& staging) const;
  void visit_record(const Home& home, const TileVisitor& visit, bool changes, const Memory& memory) const;
  void do_on_all_ranks(const std::function<void()>& work) const;
  const CompiledPlan& plan() const { return parts_.running.plan(); }
  DType dtype_of(const Home& home) const { return plan().model().units[home.unit].dtype; }

  Parts parts_;
};

}  // namespace ballast

// Brings a rank's memory and records to their initial state.
#pragma once

#include <ballast/local_state.h>

#include "zero/engine/home_memory.h"
#include "zero/engine/record_lane.h"
#include "zero/engine/record_memory.h"

namespace ballast {

// Used by the trainer's thread, before the program's entry is run.
class Startup {
 public:
  // All of it outlives this.
  struct Parts {
    const RunningProgram& running;
    const Slots& slots;
    const LaneArithmetic& arithmetic;
    const HomeMemory& homes;
    const RecordLane* records = nullptr;  // null: no tile is on a drive
  };
  explicit Startup(const Parts& parts) : parts_(parts) {}

  void clear_device_memory() const;  // the host's is clear from the beginning

  // Optimizer state begins at zero; records are written, and committed as step 0.
  void initialize(const ParameterSource& source) const;

  // Reads everything that is trained from the records of the newest committed step, and returns its number. Frozen parameters
  // come from their source again, in each tier.
  std::uint64_t resume(const ParameterSource& frozen) const;

 private:
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
  const CompiledPlan& plan() const { return parts_.running.plan(); }
  DType dtype_of(const Home& home) const { return plan().model().units[home.unit].dtype; }

  Parts parts_;
};

}  // namespace ballast

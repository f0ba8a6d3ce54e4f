// Access from host memory to parameters and state between steps, wherever they lie.
#pragma once

#include <vector>

#include "zero/engine/arithmetic.h"
#include "zero/engine/running_program.h"
#include "zero/engine/staging.h"

namespace ballast {

// Used by the trainer's thread between steps, when nothing is under way.
class HomeMemory {
 public:
  // All of it outlives this.
  HomeMemory(const RunningProgram& running, const Slots& slots, const LaneArithmetic& arithmetic)
      : running_(running), slots_(slots), arithmetic_(arithmetic) {}

  Staging staging(std::size_t most_bytes) const { return Staging(arithmetic_, most_bytes); }

  // Host memory in which a piece is made: the piece itself, or temporary memory if it lies nowhere.
  class Draft {
   public:
    Draft(const HomeMemory& homes, const Piece& piece, std::size_t bytes);
    Draft(Draft&&) = delete;
    std::span<std::byte> bytes() const { return bytes_; }

   private:
    std::vector<std::byte> elsewhere_;
    std::span<std::byte> bytes_;
  };

  // A piece to be read or changed in host memory: itself, or a copy of it if it lies on a GPU.
  class OnHost {
   public:
    OnHost(const HomeMemory& homes, const Piece& piece, Staging& staging);
    OnHost(OnHost&&) = delete;
    std::byte* data() const { return data_; }
    bool is_copy() const { return !copy_.empty(); }

   private:
    std::vector<std::byte> copy_;
    std::byte* data_;
  };

  // The state of a stretch of a tile, to be read or changed in host memory: a part of the tile's, or a copy of it if it
  // lies on a GPU. A copy of a whole tile could be as large as the shard.
  class StateOnHost {
   public:
    StateOnHost(const HomeMemory& homes, const Home& stretch, Staging& staging);
    StateOnHost(StateOnHost&&) = delete;
    const TileMemory& memory() const { return memory_; }  // the parameter is left out
    void put_back();                                      // where it was copied from

   private:
    Staging& staging_;
    std::byte* state_;                       // the state of the tile
    std::vector<optim::StateField> fields_;  // the fields of the stretch, there
    optim::StateLayout of_copy_;
    std::vector<std::byte> copy_{};
    TileMemory memory_{};
  };

  // The stretches of a tile in memory, in order. Each is a home whose state is still the tile's.
  std::vector<Home> stretches_of(const Home& tile) const;

  void put(const Piece& to, const std::byte* from, Staging& staging) const;  // `from` may be changed when this returns
  void read(const ConstView& view, std::byte* into) const;                   // also a GPU's memory, into the host's

  Piece parameters_of(const Home& tile) const;  // a tile's own parameters, or a part of the unit's
  void keep_parameters(const Home& tile, const std::byte* from, Staging& staging) const;  // everywhere but in records
  View full_parameters(std::size_t unit) const;  // where the program keeps all of the unit, as it is laid out

 private:
  DType dtype_of(const Home& home) const { return running_.plan().model().units[home.unit].dtype; }
  Range range_in_tile(const Home& stretch) const;
  const optim::StateLayout& layout_of(const Home& tile) const {
    return running_.plan().blocks().state(tile.unit, tile.tile);
  }

  const RunningProgram& running_;
  const Slots& slots_;
  const LaneArithmetic& arithmetic_;
};

}  // namespace ballast

// Access from host memory to parameters and state between steps, wherever they lie.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "offload/completion.h"
#include "zero/engine/arithmetic.h"
#include "zero/engine/slots.h"

namespace ballast {

// Copies between a GPU and any host memory, through a pair of pinned buffers. The host fills or empties one buffer while the
// other one is on its way. Copies share a buffer, so the host waits once for 16 MiB, however many copies they are. Copies are
// done in order. The buffers live as long as this object, which lives for one call of the engine, and are not in the training's
// accounts. If the driver refuses to pin them, the copies are right, but slow. Without a GPU there are no buffers.
//
// Used by the trainer's thread between steps, when nothing is under way.
class Staging {
 public:
  // `most_bytes` are those of all copies together. The arithmetic outlives this.
  Staging(const LaneArithmetic& arithmetic, std::size_t most_bytes);
  Staging(Staging&&) = delete;

  void reserve();  // throws B2001 if there is too little memory; else the first copy does

  // Writes the bytes from the given one on, which are not clear.
  using Writer = std::function<void(std::size_t first, std::span<std::byte> bytes)>;

  void upload(std::byte* to, const std::byte* from, std::size_t bytes);    // `from` may be changed when this returns
  void upload(std::span<std::byte> to, const Writer& writer);              // calls `writer` once or more, in order
  void download(std::byte* to, const std::byte* from, std::size_t bytes);  // `to` is written when finish() returns
  void zero(std::byte* memory, std::size_t bytes) { device_.zero(memory, bytes); }
  void finish();  // waits for all copies

 private:
  struct Arrival {
    std::byte* to;
    const std::byte* from;  // a place in the buffer
    std::size_t bytes;
  };
  struct Half {
    std::byte* memory = nullptr;
    std::size_t used = 0;
    std::optional<Event> copied{};  // recorded after its last copy
    std::vector<Arrival> arrivals{};
  };

  std::span<std::byte> room_for(std::size_t most);
  void turn();
  void settle(Half& half);
  void copy_on_host(std::byte* to, const std::byte* from, std::size_t bytes);

  ExecContext device_;
  kernels::Backend& cpu_;
  std::size_t half_bytes_;
  MemoryAccounts accounts_{};
  Buffer buffer_{};
  std::array<Half, 2> halves_{};
  std::size_t current_ = 0;  // half
};

// Access from host memory to what lies in any tier. Used by the trainer's thread between steps, when nothing is under way.
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
    optim::StateLayout copy_layout_;
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

// Memory for records between steps: the slots into which a step reads them. Pieces are used in turn: while one is on its way to
// its drive, the next one is filled.
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
      frozen_.emplace(first_regions(running.program(), plan.blocks().records().parameter_record()), slots);
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

// Access from host memory to parameters and state between steps, wherever they lie.
#pragma once

#include <ballast/error.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <vector>

#include "offload/completion.h"
#include "zero/engine/arithmetic.h"
#include "zero/engine/slots.h"

namespace ballast {

// Access from host memory to what lies in any tier. Used by the trainer's thread between steps, when nothing is under way.
class HomeMemory {
 public:
  // All of it outlives this.
  HomeMemory(const RunningProgram& running, const Slots& slots, const LaneArithmetic& arithmetic)
      : running_(running), slots_(slots), arithmetic_(arithmetic) {}

  Staging staging(std::size_t most_bytes) const {
    return Staging(arithmetic_.copies(), arithmetic_.of(Lane::host).context().backend(), most_bytes);
  }

  // Host memory in which a piece is made: the piece itself, or temporary memory if it lies nowhere.
  class Draft {
   public:
    Draft(const HomeMemory& homes, const Piece& piece, std::size_t bytes)
        : elsewhere_(piece.exists() ? 0 : bytes),
          bytes_(elsewhere_.empty() ? std::span(homes.slots_.data(piece), bytes) : std::span(elsewhere_)) {}

    Draft(Draft&&) = delete;
    std::span<std::byte> bytes() const { return bytes_; }

   private:
    std::vector<std::byte> elsewhere_;
    std::span<std::byte> bytes_;
  };

  // A piece to be read or changed in host memory: itself, or a copy of it if it lies on a GPU.
  class OnHost {
   public:
    OnHost(const HomeMemory& homes, const Piece& piece, Staging& staging)
        : copy_(homes.slots_.on_gpu(piece) ? piece.bytes : 0),
          data_(copy_.empty() ? homes.slots_.data(piece) : copy_.data()) {
      if (copy_.empty()) return;
      staging.download(data_, homes.slots_.data(piece), piece.bytes);
      staging.finish();
    }

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
    StateOnHost(const HomeMemory& homes, const Home& stretch, Staging& staging)
        : staging_(staging),
          state_(homes.slots_.data(stretch.state)),
          fields_(homes.layout_of(stretch).fields_of(homes.range_in_tile(stretch).first, stretch.range.count)),
          copy_layout_(homes.layout_of(stretch).layout_of(stretch.range.count)) {
      if (homes.slots_.on_gpu(stretch.state)) {
        copy_.resize(copy_layout_.bytes());
        memory_ = copy_layout_.tile(copy_.data());
        for (std::size_t i = 0; i < fields_.size(); ++i) {
          staging.download(copy_.data() + copy_layout_.fields()[i].offset, state_ + fields_[i].offset,
                           fields_[i].bytes);
        }
        staging.finish();
      } else {
        memory_ = kernels::part(homes.layout_of(stretch).tile(state_), homes.range_in_tile(stretch).first,
                                stretch.range.count);
      }
      memory_.count = stretch.range.count;
      memory_.first_index = stretch.range.first;
    }

    StateOnHost(StateOnHost&&) = delete;
    const TileMemory& memory() const { return memory_; }  // the parameter is left out

    void put_back() {  // where it was copied from
      for (std::size_t i = 0; i < fields_.size() && !copy_.empty(); ++i) {
        staging_.upload(state_ + fields_[i].offset, copy_.data() + copy_layout_.fields()[i].offset, fields_[i].bytes);
      }
    }

   private:
    Staging& staging_;
    std::byte* state_;                       // the state of the tile
    std::vector<optim::StateField> fields_;  // the fields of the stretch, there
    optim::StateLayout copy_layout_;
    std::vector<std::byte> copy_{};
    TileMemory memory_{};
  };

  // The stretches of a tile in memory, in order. Each is a home whose state is still the tile's.
  std::vector<Home> stretches_of(const Home& tile) const {
    const std::size_t width = byte_size(dtype_of(tile));
    std::vector<Home> stretches;
    constexpr std::size_t stretch_elements = std::size_t{1} << 20;  // of whole groups
    for (const Range& range : cut({0, tile.range.count}, stretch_elements)) {
      Home& stretch = stretches.emplace_back(tile);
      stretch.range = {tile.range.first + range.first, range.count};
      if (tile.parameters.exists()) stretch.parameters = tile.parameters.part(range.first * width, range.count * width);
    }
    return stretches;
  }

  // `from` may be changed when this returns.
  void put(const Piece& to, const std::byte* from, Staging& staging) const {
    std::byte* const into = slots_.data(to);
    slots_.on_gpu(to) ? staging.upload(into, from, to.bytes) : void(std::memcpy(into, from, to.bytes));
  }

  // Reads memory of the training, on a GPU too, into the host's.
  void read(const ConstView& view, std::byte* into) const {
    if (view.data() == into) return;
    const ExecContext& context = arithmetic_.copies();
    context.copy(into, view.data(), view.bytes());
    context.finish();
  }

  // Returns a tile's own parameters. If its state lies on the device, they are a part of those that the unit keeps there.
  Piece parameters_of(const Home& tile) const {
    if (tile.parameters.exists()) return tile.parameters;
    const std::size_t width = byte_size(dtype_of(tile));
    for (const Home& kept : running_.program().homes) {
      if (kept.unit != tile.unit || kept.tile != none || intersection(kept.range, tile.range) != tile.range) continue;
      return kept.parameters.part((tile.range.first - kept.range.first) * width, tile.range.count * width);
    }
    fail(Code::internal, {.what = "cannot find the parameter of a tile"});
  }

  // Writes a tile's parameters to all memory that keeps them. Its record is left out.
  void keep_parameters(const Home& tile, const std::byte* from, Staging& staging) const {
    const std::size_t width = byte_size(dtype_of(tile));
    for (const Home& kept : running_.program().homes) {
      const Range common = intersection(kept.range, tile.range);
      if (kept.unit != tile.unit || !kept.parameters.exists() || common.count == 0) continue;
      const Piece to = kept.parameters.part((common.first - kept.range.first) * width, common.count * width);
      const std::byte* const values = from + (common.first - tile.range.first) * width;
      if (slots_.data(to) != values) put(to, values, staging);
    }
  }

  // The memory in which the program keeps all of a unit, as it is laid out.
  View full_parameters(std::size_t unit) const {
    const CompiledPlan& plan = running_.plan();
    const std::vector<Home>& homes = running_.program().homes;
    const auto whole = std::ranges::find_if(homes, [&](const Home& home) {
      return home.unit == unit && home.tile == none && home.range.count == plan.layout().units[unit].elements();
    });
    require(whole != homes.end(), Code::bad_argument, [&] {
      return Problem{.what = "cannot view full parameters: they are gathered on demand",
                     .where = "unit " + plan.model().units[unit].name,
                     .needed = "a lease of the unit, or a stage below 3"};
    });
    return slots_.view(whole->parameters, plan.model().units[unit].dtype);
  }

 private:
  DType dtype_of(const Home& home) const { return running_.plan().model().units[home.unit].dtype; }

  Range range_in_tile(const Home& stretch) const {
    const CompiledPlan& plan = running_.plan();
    const UnitLayout& layout = plan.layout().units[stretch.unit];
    const std::size_t shard = layout.trained.shard_range(plan.input().rank_in_shard_group).first;
    return {stretch.range.first - shard - layout.tiles[stretch.tile].first, stretch.range.count};
  }

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
  ~RecordMemory() { offload::settle(written_); }  // no request may use the slots any more

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
    const RecordSizes& sizes = plan.blocks().records();
    const auto pieces = [&](SlotRole role, std::size_t bytes) {
      return pieces_of(running.program().slots, role, bytes);
    };
    if (plan.tiles_on_drive() > 0) {
      const std::vector<Piece> staging = pieces(SlotRole::staging, sizes.record);
      trained_.emplace(staging.empty() ? pieces(SlotRole::kept, sizes.record) : staging, slots);
    }
    if (plan.frozen_on_drive() > 0) {
      frozen_.emplace(pieces(SlotRole::first_regions, sizes.parameter_record()), slots);
    }
  }

  RecordMemory& of(const Home& home) { return home.frozen ? *frozen_ : *trained_; }

  void finish() const {
    for (const std::optional<RecordMemory>* memory : {&trained_, &frozen_}) {
      if (*memory) (*memory)->finish();
    }
  }

 private:
  static std::vector<Piece> pieces_of(const std::vector<Slot>& slots, SlotRole role, std::size_t bytes) {
    std::vector<Piece> pieces;
    const auto slot = std::ranges::find(slots, role, &Slot::role);
    if (slot == slots.end()) return pieces;
    const auto number = static_cast<std::size_t>(slot - slots.begin());
    for (std::size_t begin = 0; begin + bytes <= slot->bytes; begin += bytes)
      pieces.push_back({number, begin, bytes});
    return pieces;
  }

  std::optional<RecordMemory> trained_{};
  std::optional<RecordMemory> frozen_{};
};

}  // namespace ballast

// Begins, shows and changes what a rank keeps between steps.
#pragma once

#include <ballast/error.h>
#include <ballast/local_state.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "kernels/runtime/host_limits.h"
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
    Slots& slots;
    const LaneArithmetic& arithmetic;
    const HomeMemory& homes;
    Mesh& mesh;
    const RecordLane* records = nullptr;  // null: no tile is on a drive
  };
  explicit LocalState(const Parts& parts) : parts_(parts) {}

  void clear_device_memory() const {  // the host's is clear from the beginning
    const ExecContext& context = parts_.arithmetic.copies();
    const std::vector<Slot>& slots = parts_.running.program().slots;
    for (std::size_t slot = 0; slot < slots.size(); ++slot) {
      std::byte* const memory = parts_.slots.data({slot, 0, slots[slot].bytes});
      if (slots[slot].tier == Tier::device && memory != nullptr) context.zero(memory, slots[slot].bytes);
    }
    context.finish();
  }

  // Optimizer state begins at zero; records are written, and committed as step 0.
  void initialize(const ParameterSource& source) const {
    const Program& program = parts_.running.program();
    RecordsMemory records(parts_.running, parts_.slots);
    std::size_t unwritten = 0;
    for (const Home& home : program.homes) {
      unwritten += unwritten_bytes(home);
    }
    Staging staged = staging();
    std::size_t unit = none;
    for (const Home& home : program.homes) {
      if (std::exchange(unit, home.unit) != home.unit) {  // other ranks of this machine take memory, too
        require_host_memory(unwritten, "the rest of what this rank keeps", read_host_limits());
      }
      reserve_late(home);
      home.on_drive ? fill_record(home, source, records.of(home)) : fill_home(home, source, staged);
      unwritten -= unwritten_bytes(home);
    }
    staged.finish();
    records.finish();
    if (plan().tiles_on_drive() > 0) parts_.records->commit({.step = 0});
  }

  // Reads everything that is trained from the records of the newest committed step, and returns its number. Frozen parameters
  // come from their source again, in each tier.
  std::uint64_t resume(const ParameterSource& frozen) const {
    const Program& program = parts_.running.program();
    Staging staged = staging();
    for (const Home& home : program.homes) {
      const bool whole = home.on_drive && plan().blocks().full_records();
      require(whole || home.tile == none || home.frozen, Code::unsupported, [&] {
        return Problem{.what = "cannot resume the training: its state or its parameters are not on a drive",
                       .where = "unit " + plan().model().units[home.unit].name,
                       .needed = "all of the state in records, with the parameters: those of a run that has a name"};
      });
    }
    RecordsMemory records(parts_.running, parts_.slots);
    for (const Home& home : program.homes) {
      reserve_late(home);
      if (home.tile == none) fill_frozen(home, frozen, staged);
      if (home.frozen) fill_record(home, frozen, records.of(home));
    }
    for (const Home& home : program.homes) {
      if (home.on_drive && !home.frozen) read_home(home, records.of(home), staged);
    }
    records.finish();
    staged.finish();
    return parts_.records != nullptr ? parts_.records->step() : 0;
  }

  // Tiles, and large ones in stretches, listed in the order in which they are visited; without their memory.
  std::vector<LocalTile> tiles() const {
    std::vector<LocalTile> tiles;
    std::ranges::transform(local_homes(), std::back_inserter(tiles), without_memory);
    return tiles;
  }

  // A program that keeps all records in memory lends this memory to the visit, and reads the records again after it.
  void look(const TileVisitor& visit, const TileFilter& which) const {
    std::vector<Home> homes = local_homes();
    std::erase_if(homes, [&](const Home& home) { return !is_wanted(home, which); });
    if (homes.empty()) return;
    visit_tiles(homes, visit, false);
    const Program& program = parts_.running.program();
    if (std::ranges::find(program.slots, SlotRole::staging, &Slot::role) != program.slots.end()) return;
    for (const Op& op : program.entry) {
      if (op.kind == OpKind::read) parts_.records->read(op).check();
    }
  }

  // Tiles on drives are written, and committed after `agree` as the state that `committed` returns then: `agree` may set it.
  // All ranks of a run change its state together; if one fails, none changes its records: it throws its own error, the
  // others B3301.
  // A rank overwrites the generation before the last one here, so all ranks must have committed the last one. Otherwise a
  // crash could leave them without a commit in common.
  void change(const TileVisitor& visit, const std::function<void()>& agree,
              const std::function<CommittedState()>& committed) const {
    const auto visit_all = [&] { visit_tiles(local_homes(), visit, true); };
    const bool keeps_run = parts_.records != nullptr && parts_.records->keeps_run();
    if (keeps_run) parts_.mesh.barrier();
    try {
      keeps_run ? do_on_all_ranks(visit_all) : visit_all();
      keeps_run ? do_on_all_ranks(agree) : agree();
    } catch (...) {
      if (parts_.records != nullptr) parts_.records->abandon();
      throw;
    }
    if (plan().tiles_on_drive() > 0) parts_.records->commit(committed());
  }

 private:
  static constexpr std::size_t frozen_stretch = std::size_t{1}
                                                << 20;  // elements that are visited together; whole groups

  struct Memory {
    RecordMemory& records;
    Staging& staging;
  };

  void reserve_late(const Home& home) const {
    for (const Piece& piece : {home.parameters, home.state}) {
      const std::span<std::byte> memory = parts_.slots.reserve_late(piece);
      if (!memory.empty()) parts_.arithmetic.copies().zero(memory.data(), memory.size());
    }
  }

  static LocalTile without_memory(const Home& home) {
    return {.unit = home.unit, .range = home.range, .memory = {}, .frozen = home.tile == none || home.frozen};
  }

  // Loads a range of a unit, tensor by tensor. Padding stays zero.
  void load(std::size_t unit, const Range& range, const View& to, const ParameterSource& source) const {
    const std::vector<Tensor>& tensors = plan().model().units[unit].tensors;
    const UnitLayout& layout = plan().layout().units[unit];
    for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
      const std::size_t begin = layout.tensor_begin[tensor];
      const Range common = intersection(range, {begin, tensors[tensor].elements()});
      if (common.count == 0) continue;
      source(unit, tensor, {common.first - begin, common.count}, to.part(common.first - range.first, common.count));
    }
  }

  // Parameters that the unit keeps come before its tiles, and those of tiles on a GPU are among them.
  void fill_home(const Home& home, const ParameterSource& source, Staging& staging) const {
    if (parts_.slots.on_gpu(home.state)) return begin_on_gpu(home);
    parts_.slots.on_gpu(home.parameters) ? upload(home, home.range, source, staging)
                                         : fill_on_host(home, source, staging);
  }

  // A tile may be as large as a shard, so its values and its state are made in stretches.
  void fill_on_host(const Home& home, const ParameterSource& source, Staging& staging) const {
    const ExecContext& host = parts_.arithmetic.of(Lane::host).context();
    if (home.state.bytes > 0) host.zero(parts_.slots.data(home.state), home.state.bytes);
    for (const Home& part : home.tile != none ? parts_.homes.stretches_of(home) : std::vector{home}) {
      const DType dtype = dtype_of(part);
      const HomeMemory::Draft parameters(parts_.homes, part.parameters, part.range.count * byte_size(dtype));
      const View values(parameters.bytes().data(), part.range.count, dtype);
      load(part.unit, part.range, values, source);
      if (!part.state.exists()) continue;
      TileMemory tile = HomeMemory::StateOnHost(parts_.homes, part, staging).memory();
      tile.parameter = values.data();
      parts_.arithmetic.of(Lane::host).begin_state(tile);
    }
  }

  // The device's memory is clear from the beginning.
  void begin_on_gpu(const Home& tile) const {
    TileMemory memory = plan().blocks().state(tile.unit, tile.tile).tile(parts_.slots.data(tile.state));
    memory.parameter = parts_.slots.data(parts_.homes.parameters_of(tile));
    parts_.arithmetic.of(Lane::upload).begin_state(memory);
  }

  void upload(const Home& home, const Range& range, const ParameterSource& source, Staging& staging) const {
    const DType dtype = dtype_of(home);
    const std::size_t width = byte_size(dtype);
    const Piece to = home.parameters.part((range.first - home.range.first) * width, range.count * width);
    staging.upload(parts_.slots.bytes(to), [&](std::size_t first, std::span<std::byte> bytes) {
      const Range part{range.first + first / width, bytes.size() / width};
      std::ranges::fill(bytes, std::byte{0});
      load(home.unit, part, View(bytes.data(), part.count, dtype), source);
    });
  }

  void fill_record(const Home& home, const ParameterSource& source, RecordMemory& memory) const {
    const DType dtype = dtype_of(home);
    const std::span<std::byte> record = memory.next();
    const std::span<std::byte> block = parts_.records->block(home.unit, home.tile, record);
    TileMemory tile = recorded(home, block.data());
    std::vector<std::byte> elsewhere(tile.parameter != nullptr ? 0 : home.range.count * byte_size(dtype));
    if (tile.parameter == nullptr) tile.parameter = elsewhere.data();
    const View parameters(tile.parameter, home.range.count, dtype);
    std::ranges::fill(block, std::byte{0});
    load(home.unit, home.range, parameters, source);
    if (!home.frozen) parts_.arithmetic.of(Lane::host).begin_state(tile);
    if (home.parameters.exists()) std::ranges::copy(parameters.as_bytes(), parts_.slots.data(home.parameters));
    memory.is_written_by(parts_.records->write(home.unit, home.tile, record));
  }

  void fill_frozen(const Home& home, const ParameterSource& frozen, Staging& staging) const {
    const UnitLayout& layout = plan().layout().units[home.unit];
    const DType dtype = dtype_of(home);
    const Range range = intersection(home.range, {layout.frozen.first, layout.frozen.count()});
    if (range.count == 0) return;
    if (parts_.slots.on_gpu(home.parameters)) return upload(home, range, frozen, staging);
    const Piece piece =
        home.parameters.part((range.first - home.range.first) * byte_size(dtype), range.count * byte_size(dtype));
    load(home.unit, range, parts_.slots.view(piece, dtype), frozen);
  }

  void read_home(const Home& home, RecordMemory& memory, Staging& staging) const {
    const std::span<std::byte> record = memory.next();
    const std::span<std::byte> block = parts_.records->read(home.unit, home.tile, record).payload();
    parts_.homes.keep_parameters(home, block.data(), staging);
  }

  std::size_t unwritten_bytes(const Home& home) const {
    return parts_.slots.unwritten_bytes(home.parameters) + parts_.slots.unwritten_bytes(home.state);
  }

  // Returns memory that brings parameters to a GPU.
  Staging staging() const {
    std::size_t bytes = 0;
    for (const Home& home : parts_.running.program().homes) {
      bytes += parts_.slots.on_gpu(home.parameters) ? home.parameters.bytes : 0;
    }
    return parts_.homes.staging(bytes);
  }

  // Returns tiles on drives, and those in memory and frozen parameters there in stretches. Frozen ones come once, though several
  // homes may hold them.
  std::vector<Home> local_homes() const {
    std::vector<Home> homes;
    std::size_t seen = none;  // unit whose frozen parameters are among them
    for (const Home& home : parts_.running.program().homes) {
      if (home.tile != none) {
        const std::vector<Home> parts = home.on_drive ? std::vector{home} : parts_.homes.stretches_of(home);
        homes.insert(homes.end(), parts.begin(), parts.end());
        continue;
      }
      const Section& frozen = plan().layout().units[home.unit].frozen;
      const Range range = intersection(home.range, {frozen.first, frozen.count()});
      if (range.count == 0 || seen == home.unit) continue;
      seen = home.unit;
      for (const Range& stretch : cut(range, frozen_stretch))
        homes.push_back({.unit = home.unit, .range = stretch});
    }
    return homes;
  }

  bool is_wanted(const Home& home, const TileFilter& which) const {
    LocalTile tile = without_memory(home);
    const bool is_in_run =
        home.on_drive && !home.frozen && parts_.records->keeps_run() && plan().names().own_values == 0;
    if (!is_in_run) return which(tile);
    const offload::OpenRecord record = parts_.records->newest(home.unit, home.tile);
    tile.record = &record;
    return which(tile);
  }

  // Returns the bytes of the largest home that is visited. Each is copied alone.
  std::size_t largest_bytes(const std::vector<Home>& homes) const {
    std::size_t largest = 0;
    for (const Home& home : homes) {
      const std::size_t parameters = home.range.count * byte_size(dtype_of(home));
      const bool has_state = home.tile != none && !home.frozen;
      const std::size_t state =
          has_state ? plan().blocks().state(home.unit, home.tile).layout_of(home.range.count).bytes() : 0;
      largest = std::max(largest, parameters + state);
    }
    return largest;
  }

  void visit_tiles(const std::vector<Home>& homes, const TileVisitor& visit, bool changes) const {
    RecordsMemory records(parts_.running, parts_.slots);
    Staging staging = parts_.homes.staging(largest_bytes(homes));
    for (const Home& home : homes) {
      if (home.tile == none) {
        visit_frozen(home, visit, changes, staging);
      } else if (home.on_drive) {
        visit_record(home, visit, changes, {records.of(home), staging});
      } else {
        visit_memory(home, visit, changes, staging);
      }
    }
    staging.finish();
    records.finish();
  }

  TileMemory frozen_memory(const Home& home, std::byte* parameter) const {
    return {.parameter_dtype = dtype_of(home),
            .parameter = parameter,
            .count = home.range.count,
            .first_index = home.range.first};
  }

  // The tile of a record, in the memory of its block.
  TileMemory recorded(const Home& home, std::byte* block) const {
    return home.frozen ? frozen_memory(home, block)
                       : plan().blocks().recorded(home.unit, home.tile, home.range.count, block);
  }

  void visit_frozen(const Home& home, const TileVisitor& visit, bool changes, Staging& staging) const {
    const HomeMemory::OnHost parameter(parts_.homes, parts_.homes.parameters_of(home), staging);
    visit({home.unit, home.range, frozen_memory(home, parameter.data()), true});
    if (changes) parts_.homes.keep_parameters(home, parameter.data(), staging);
  }

  void visit_memory(const Home& home, const TileVisitor& visit, bool changes, Staging& staging) const {
    const Piece at = parts_.homes.parameters_of(home);
    const HomeMemory::OnHost parameter(parts_.homes, at, staging);
    HomeMemory::StateOnHost state(parts_.homes, home, staging);
    TileMemory memory = state.memory();
    memory.parameter = parameter.data();
    visit({home.unit, home.range, memory});
    if (!changes) return;
    if (parameter.is_copy()) parts_.homes.put(at, parameter.data(), staging);
    state.put_back();
    parts_.homes.keep_parameters(home, parameter.data(), staging);
  }

  void visit_record(const Home& home, const TileVisitor& visit, bool changes, const Memory& memory) const {
    const std::span<std::byte> record = memory.records.next();
    const std::span<std::byte> block = parts_.records->read(home.unit, home.tile, record).payload();
    TileMemory tile = recorded(home, block.data());
    const Piece in_memory = tile.parameter != nullptr ? Piece{} : parts_.homes.parameters_of(home);
    const HomeMemory::OnHost copy(parts_.homes, in_memory, memory.staging);
    if (in_memory.exists()) tile.parameter = copy.data();
    tile.first_index = home.range.first;
    visit({home.unit, home.range, tile, home.frozen});
    if (!changes) return;
    parts_.homes.keep_parameters(home, tile.parameter, memory.staging);
    memory.records.is_written_by(parts_.records->write(home.unit, home.tile, record));
  }

  // Fails on all ranks if it fails on one. Otherwise the other ranks would commit what follows under a name that this
  // rank gives to another state later. A rank throws its own error, which says more than the one that the others get.
  void do_on_all_ranks(const std::function<void()>& work) const {
    std::exception_ptr own;
    try {
      work();
    } catch (...) {
      own = std::current_exception();
    }
    std::vector<std::size_t> failed;
    try {
      failed = parts_.mesh.where(own != nullptr);
    } catch (...) {
      if (!own) throw;
    }
    if (own) std::rethrow_exception(own);
    require(failed.empty(), Code::peer_failed, [&] {
      return Problem{.what = fmt::format("rank {} cannot change the state of the run, so no rank changes it",
                                         fmt::join(failed, ", ")),
                     .remedy = "Look at the error of that rank. The last commit is as it was."};
    });
  }

  const CompiledPlan& plan() const { return parts_.running.plan(); }
  DType dtype_of(const Home& home) const { return plan().model().units[home.unit].dtype; }

  Parts parts_;
};

}  // namespace ballast

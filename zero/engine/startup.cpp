#include "zero/engine/startup.h"

#include <ballast/error.h>

#include <algorithm>
#include <optional>

#include "kernels/runtime/host_limits.h"

namespace ballast {

void Startup::clear_device_memory() const {
  const ExecContext& context = parts_.arithmetic.copies();
  const std::vector<Slot>& slots = parts_.running.program().slots;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    const std::size_t bytes = slots[slot].bytes;
    if (slots[slot].tier == Tier::device && bytes > 0) context.zero(parts_.slots.data({slot, 0, bytes}), bytes);
  }
  context.finish();
}

std::size_t Startup::unwritten_bytes(const Home& home) const {
  return parts_.slots.unwritten_bytes(home.parameters) + parts_.slots.unwritten_bytes(home.state);
}

Staging Startup::staging() const {
  std::size_t bytes = 0;
  for (const Home& home : parts_.running.program().homes) {
    bytes += parts_.slots.on_gpu(home.parameters) ? home.parameters.bytes : 0;
  }
  return parts_.homes.staging(bytes);
}

void Startup::initialize(const ParameterSource& source) const {
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
    home.on_drive ? fill_record(home, source, records.of(home)) : fill_home(home, source, staged);
    unwritten -= unwritten_bytes(home);
  }
  staged.finish();
  records.finish();
  if (plan().tiles_on_drive() > 0) parts_.records->commit({.step = 0});
}

// Loads a range of a unit, tensor by tensor. Padding stays zero.
void Startup::load(std::size_t unit, const Range& range, const View& to, const ParameterSource& source) const {
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
void Startup::fill_home(const Home& home, const ParameterSource& source, Staging& staging) const {
  if (parts_.slots.on_gpu(home.state)) return begin_on_gpu(home);
  parts_.slots.on_gpu(home.parameters) ? upload(home, home.range, source, staging)
                                       : fill_on_host(home, source, staging);
}

// The device's memory is clear from the beginning.
void Startup::begin_on_gpu(const Home& tile) const {
  TileMemory memory = plan().blocks().state(tile.unit, tile.tile).tile(parts_.slots.data(tile.state));
  memory.parameter = parts_.slots.data(parts_.homes.parameters_of(tile));
  parts_.arithmetic.of(Lane::upload).begin_state(memory);
}

void Startup::upload(const Home& home, const Range& range, const ParameterSource& source, Staging& staging) const {
  const DType dtype = dtype_of(home);
  const std::size_t width = byte_size(dtype);
  const Piece to = home.parameters.part((range.first - home.range.first) * width, range.count * width);
  staging.upload(parts_.slots.bytes(to), [&](std::size_t first, std::span<std::byte> bytes) {
    const Range part{range.first + first / width, bytes.size() / width};
    std::ranges::fill(bytes, std::byte{0});
    load(home.unit, part, View(bytes.data(), part.count, dtype), source);
  });
}

// A tile may be as large as a shard, so its values and its state are made in stretches.
void Startup::fill_on_host(const Home& home, const ParameterSource& source, Staging& staging) const {
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

void Startup::fill_record(const Home& home, const ParameterSource& source, RecordMemory& memory) const {
  const DType dtype = dtype_of(home);
  const std::span<std::byte> record = memory.next();
  const std::span<std::byte> block = parts_.records->block(home.unit, home.tile, record);
  if (home.frozen) {
    std::ranges::fill(block, std::byte{0});
    load(home.unit, home.range, View(block.data(), home.range.count, dtype), source);
    return memory.is_written_by(parts_.records->write(home.unit, home.tile, record));
  }
  TileMemory tile = plan().blocks().recorded(home.unit, home.tile, home.range.count, block.data());
  std::vector<std::byte> elsewhere(tile.parameter != nullptr ? 0 : home.range.count * byte_size(dtype));
  if (tile.parameter == nullptr) tile.parameter = elsewhere.data();
  const View parameters(tile.parameter, home.range.count, dtype);
  std::ranges::fill(block, std::byte{0});
  load(home.unit, home.range, parameters, source);
  parts_.arithmetic.of(Lane::host).begin_state(tile);
  if (home.parameters.exists()) std::ranges::copy(parameters.as_bytes(), parts_.slots.data(home.parameters));
  memory.is_written_by(parts_.records->write(home.unit, home.tile, record));
}

std::uint64_t Startup::resume(const ParameterSource& frozen) const {
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

void Startup::fill_frozen(const Home& home, const ParameterSource& frozen, Staging& staging) const {
  const UnitLayout& layout = plan().layout().units[home.unit];
  const DType dtype = dtype_of(home);
  const Range range = intersection(home.range, {layout.frozen.first, layout.frozen.count()});
  if (range.count == 0) return;
  if (parts_.slots.on_gpu(home.parameters)) return upload(home, range, frozen, staging);
  const Piece piece =
      home.parameters.part((range.first - home.range.first) * byte_size(dtype), range.count * byte_size(dtype));
  load(home.unit, range, parts_.slots.view(piece, dtype), frozen);
}

void Startup::read_home(const Home& home, RecordMemory& memory, Staging& staging) const {
  const std::span<std::byte> record = memory.next();
  const std::span<std::byte> block = parts_.records->read(home.unit, home.tile, record).payload();
  parts_.homes.keep_parameters(home, block.data(), staging);
}

}  // namespace ballast

#include "zero/engine/home_memory.h"

#include <ballast/error.h>

#include <algorithm>
#include <cstring>

#include "kernels/runtime/sizes.h"

namespace ballast {
namespace {

constexpr std::size_t most_half_bytes = std::size_t{16} << 20;  // the bus is at its speed; pinned in milliseconds
constexpr std::size_t alignment = 64;                           // alignment of each copy: whole elements of all formats

constexpr std::size_t stretch_elements = std::size_t{1} << 20;  // a stretch holds whole groups

}  // namespace

Staging::Staging(const LaneArithmetic& arithmetic, std::size_t most_bytes)
    : device_(arithmetic.copies()),
      cpu_(arithmetic.of(Lane::host).context().backend()),
      half_bytes_(std::clamp(round_up(most_bytes / 2, alignment), alignment, most_half_bytes)) {}

void Staging::reserve() {
  if (device_.stream() == nullptr || buffer_.bytes() > 0) return;
  const int gpu = device_.stream()->gpu();
  buffer_ = allocate(accounts_, {.kind = MemoryKind::pinned, .bytes = 2 * half_bytes_, .owner = "staging", .gpu = gpu});
  for (std::size_t i = 0; i < halves_.size(); ++i) {
    halves_[i].memory = buffer_.data() + i * half_bytes_;
    halves_[i].copied.emplace(gpu);
  }
}

void Staging::upload(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (device_.stream() == nullptr) return device_.copy(to, from, bytes);
  upload({to, bytes},
         [&](std::size_t first, std::span<std::byte> part) { copy_on_host(part.data(), from + first, part.size()); });
}

void Staging::upload(std::span<std::byte> to, const Writer& writer) {
  if (device_.stream() == nullptr && !to.empty()) return writer(0, to);
  for (std::size_t first = 0; first < to.size();) {
    const std::span<std::byte> part = room_for(to.size() - first);
    writer(first, part);
    device_.copy(to.data() + first, part.data(), part.size());
    first += part.size();
  }
}

void Staging::download(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (device_.stream() == nullptr) return device_.copy(to, from, bytes);
  for (std::size_t first = 0; first < bytes;) {
    const std::span<std::byte> part = room_for(bytes - first);
    device_.copy(part.data(), from + first, part.size());
    halves_[current_].arrivals.push_back({.to = to + first, .from = part.data(), .bytes = part.size()});
    first += part.size();
  }
}

void Staging::finish() {
  if (buffer_.bytes() == 0) return device_.finish();
  turn();
  turn();
}

// Returns memory of the current half, or of the other one if it is full.
std::span<std::byte> Staging::room_for(std::size_t most) {
  reserve();
  if (halves_[current_].used == half_bytes_) turn();
  Half& half = halves_[current_];
  const std::span<std::byte> room(half.memory + half.used, std::min(most, half_bytes_ - half.used));
  half.used += round_up(room.size(), alignment);
  return room;
}

void Staging::turn() {
  halves_[current_].copied->record(*device_.stream());
  current_ = 1 - current_;
  settle(halves_[current_]);
}

// Waits for the copies of a half, and brings what has arrived in it to its place.
void Staging::settle(Half& half) {
  half.copied->synchronize();
  for (const Arrival& arrival : half.arrivals) {
    copy_on_host(arrival.to, arrival.from, arrival.bytes);
  }
  half.arrivals.clear();
  half.used = 0;
}

void Staging::copy_on_host(std::byte* to, const std::byte* from, std::size_t bytes) {
  cpu_.cast(ConstView(from, bytes, DType::u8), View(to, bytes, DType::u8));
}

HomeMemory::Draft::Draft(const HomeMemory& homes, const Piece& piece, std::size_t bytes)
    : elsewhere_(piece.exists() ? 0 : bytes),
      bytes_(elsewhere_.empty() ? std::span(homes.slots_.data(piece), bytes) : std::span(elsewhere_)) {}

HomeMemory::OnHost::OnHost(const HomeMemory& homes, const Piece& piece, Staging& staging)
    : copy_(homes.slots_.on_gpu(piece) ? piece.bytes : 0),
      data_(copy_.empty() ? homes.slots_.data(piece) : copy_.data()) {
  if (copy_.empty()) return;
  staging.download(data_, homes.slots_.data(piece), piece.bytes);
  staging.finish();
}

HomeMemory::StateOnHost::StateOnHost(const HomeMemory& homes, const Home& stretch, Staging& staging)
    : staging_(staging),
      state_(homes.slots_.data(stretch.state)),
      fields_(homes.layout_of(stretch).fields_of(homes.range_in_tile(stretch).first, stretch.range.count)),
      copy_layout_(homes.layout_of(stretch).layout_of(stretch.range.count)) {
  if (homes.slots_.on_gpu(stretch.state)) {
    copy_.resize(copy_layout_.bytes());
    memory_ = copy_layout_.tile(copy_.data());
    for (std::size_t i = 0; i < fields_.size(); ++i) {
      staging.download(copy_.data() + copy_layout_.fields()[i].offset, state_ + fields_[i].offset, fields_[i].bytes);
    }
    staging.finish();
  } else {
    memory_ =
        kernels::part(homes.layout_of(stretch).tile(state_), homes.range_in_tile(stretch).first, stretch.range.count);
  }
  memory_.count = stretch.range.count;
  memory_.first_index = stretch.range.first;
}

void HomeMemory::StateOnHost::put_back() {
  for (std::size_t i = 0; i < fields_.size() && !copy_.empty(); ++i) {
    staging_.upload(state_ + fields_[i].offset, copy_.data() + copy_layout_.fields()[i].offset, fields_[i].bytes);
  }
}

Range HomeMemory::range_in_tile(const Home& stretch) const {
  const CompiledPlan& plan = running_.plan();
  const UnitLayout& layout = plan.layout().units[stretch.unit];
  const std::size_t shard = layout.trained.shard_range(plan.input().rank_in_shard_group).first;
  return {stretch.range.first - shard - layout.tiles[stretch.tile].first, stretch.range.count};
}

std::vector<Home> HomeMemory::stretches_of(const Home& tile) const {
  const std::size_t width = byte_size(dtype_of(tile));
  std::vector<Home> stretches;
  for (const Range& range : cut({0, tile.range.count}, stretch_elements)) {
    Home& stretch = stretches.emplace_back(tile);
    stretch.range = {tile.range.first + range.first, range.count};
    if (tile.parameters.exists()) stretch.parameters = tile.parameters.part(range.first * width, range.count * width);
  }
  return stretches;
}

void HomeMemory::put(const Piece& to, const std::byte* from, Staging& staging) const {
  std::byte* const into = slots_.data(to);
  slots_.on_gpu(to) ? staging.upload(into, from, to.bytes) : void(std::memcpy(into, from, to.bytes));
}

void HomeMemory::read(const ConstView& view, std::byte* into) const {
  if (view.data() == into) return;
  const ExecContext& context = arithmetic_.copies();
  context.copy(into, view.data(), view.bytes());
  context.finish();
}

// If the state lies on the device, the parameter is a part of the parameters that the unit keeps there.
Piece HomeMemory::parameters_of(const Home& tile) const {
  if (tile.parameters.exists()) return tile.parameters;
  const std::size_t width = byte_size(dtype_of(tile));
  for (const Home& kept : running_.program().homes) {
    if (kept.unit != tile.unit || kept.tile != none || intersection(kept.range, tile.range) != tile.range) continue;
    return kept.parameters.part((tile.range.first - kept.range.first) * width, tile.range.count * width);
  }
  fail(Code::internal, {.what = "cannot find the parameter of a tile"});
}

void HomeMemory::keep_parameters(const Home& tile, const std::byte* from, Staging& staging) const {
  const std::size_t width = byte_size(dtype_of(tile));
  for (const Home& kept : running_.program().homes) {
    const Range common = intersection(kept.range, tile.range);
    if (kept.unit != tile.unit || !kept.parameters.exists() || common.count == 0) continue;
    const Piece to = kept.parameters.part((common.first - kept.range.first) * width, common.count * width);
    const std::byte* const values = from + (common.first - tile.range.first) * width;
    if (slots_.data(to) != values) put(to, values, staging);
  }
}

View HomeMemory::full_parameters(std::size_t unit) const {
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

}  // namespace ballast

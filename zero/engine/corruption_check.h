// Finds bits that memory, a drive or a unit of arithmetic got wrong. Every so many steps the update of one tile, or of a
// stretch of a large one, is made a second time, on the CPU with another instruction set, and must give the same bits.
// The next update there must find the bits that this one left, wherever they were stored in between. The place changes
// each time.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "zero/engine/arithmetic.h"

namespace ballast {

class CorruptionCheck {
 public:
  // Checks a place every `every` steps. `rank` is this rank's number among all, for messages. The plan outlives the
  // check.
  CorruptionCheck(const CompiledPlan& plan, std::size_t every, std::size_t rank)
      : plan_(plan), every_(every), rank_(rank), backend_(other_backend()) {
    for (std::size_t unit = 0; unit < plan.layout().units.size(); ++unit) {
      const std::vector<Range>& tiles = plan.layout().units[unit].tiles;
      for (std::size_t tile = 0; tile < tiles.size(); ++tile) {
        for (const Range& range : cut({0, tiles[tile].count}, checked_at_once)) {
          places_.push_back({unit, tile, range});
        }
      }
    }
  }

  // Makes the update, on the thread of its lane. Bits that differ are an error (B3001).
  void update(const Op& op, const StepNumbers& step, const Arithmetic& arithmetic) {
    const std::vector<const Place*> places = places_of(op, step.number);
    std::vector<Copy> expected;
    expected.reserve(places.size());
    const auto at = [&](const Place* place) { return part_on_tile(plan_.input(), op, place->tile); };
    for (const Place* place : places) {
      expected.push_back(expected_at(*place, at(place), step, arithmetic));
    }
    arithmetic.update(op, step);
    for (std::size_t i = 0; i < places.size(); ++i) {
      Copy after = copy_of(*places[i], at(places[i]), arithmetic);
      require_same(expected[i], after, *places[i], step.number,
                   "an update that was made twice gave other bits the second time");
      const std::lock_guard lock(mutex_);
      ++checked_;
      if (is_next(*places[i], step.number)) left_.insert_or_assign(places[i], std::move(after));
    }
  }

  void forget() {  // any thread: the owner has changed what updates left
    const std::lock_guard lock(mutex_);
    left_.clear();
  }

  // Returns how many were checked so far. Any thread may call.
  std::size_t places() const {
    const std::lock_guard lock(mutex_);
    return checked_;
  }

 private:
  struct Place {
    std::size_t unit = 0;
    std::size_t tile = 0;
    Range range{};  // elements of the tile

    bool is_in(const Op& op) const { return unit == op.unit && tile - op.tile < op.tiles; }
  };
  struct Copy {
    std::vector<std::byte> parameter{};
    std::vector<std::byte> state{};
  };

  // Returns a backend with the usable instruction set that differs most from the engine's.
  static std::unique_ptr<kernels::Backend> other_backend() {
    return kernels::cpu_backend({.threads = 1, .isa = kernels::simd::usable_isas().back()});
  }

  static constexpr std::size_t checked_at_once = std::size_t{256} << 10;  // elements, of whole groups

  static std::vector<std::byte> bytes_of(const std::byte* from, std::size_t count, const ExecContext& context) {
    std::vector<std::byte> bytes(count);
    if (count > 0) context.copy(bytes.data(), from, count);
    return bytes;
  }

  // The runs in a range, relative to its beginning.
  static std::vector<kernels::Run> runs_in(const std::vector<kernels::Run>& runs, const Range& range) {
    std::vector<kernels::Run> found;
    for (const kernels::Run& run : runs) {
      const Range common = intersection({run.begin, run.count}, range);
      if (common.count == 0) continue;
      found.push_back(kernels::part(run, common.first - run.begin, common.count));
      found.back().begin = common.first - range.first;
    }
    return found;
  }

  // An update only writes the parameter if the master is fp32.
  static bool is_read(const TileMemory& tile) {
    return tile.parameter_dtype == DType::fp32 || tile.format != StateFormat::fp32;
  }

  const Place& next(std::uint64_t step) const { return places_[(step / every_) % places_.size()]; }
  bool is_next(const Place& place, std::uint64_t step) const { return step % every_ == 0 && &place == &next(step); }

  // The next place to check and those that the last checks left, if the operation updates them.
  std::vector<const Place*> places_of(const Op& op, std::uint64_t step) const {
    std::vector<const Place*> places;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [place, copy] : left_) {
        if (place->is_in(op)) places.push_back(place);
      }
    }
    const bool checks_next = step % every_ == 0 && next(step).is_in(op);
    if (checks_next && std::ranges::find(places, &next(step)) == places.end()) places.push_back(&next(step));
    return places;
  }

  const optim::StateLayout& layout_of(const Place& place) const { return plan_.blocks().state(place.unit, place.tile); }

  // Compares the bits before the update with those that the last one left, and returns those that it has to leave.
  Copy expected_at(const Place& place, const Op& op, const StepNumbers& step, const Arithmetic& arithmetic) {
    std::map<const Place*, Copy>::node_type left;
    {
      const std::lock_guard lock(mutex_);
      left = left_.extract(&place);
    }
    Copy before = copy_of(place, op, arithmetic);
    if (!left.empty()) {
      if (!is_read(arithmetic.tile_of(op, step))) before.parameter = left.mapped().parameter;
      require_same(left.mapped(), before, place, step.number, "an update found other bits than the last one left");
    }
    return updated(std::move(before), place, op, step, arithmetic);
  }

  Copy copy_of(const Place& place, const Op& op, const Arithmetic& arithmetic) const {
    const TileMemory tile = kernels::part(arithmetic.tile_of(op, {}), place.range.first, place.range.count);
    const ExecContext& context = arithmetic.context();
    const optim::StateLayout copy_layout = layout_of(place).layout_of(place.range.count);
    Copy copy{.parameter = bytes_of(tile.parameter, tile.count * byte_size(tile.parameter_dtype), context),
              .state = std::vector<std::byte>(copy_layout.bytes())};
    const std::vector<optim::StateField> parts = layout_of(place).fields_of(place.range.first, place.range.count);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      context.copy(copy.state.data() + copy_layout.fields()[i].offset, arithmetic.state_of(op) + parts[i].offset,
                   parts[i].bytes);
    }
    context.finish();
    return copy;
  }

  Copy updated(Copy copy, const Place& place, const Op& op, const StepNumbers& step,
               const Arithmetic& arithmetic) const {
    const TileMemory original = kernels::part(arithmetic.tile_of(op, step), place.range.first, place.range.count);
    const std::vector<std::byte> gradient =
        bytes_of(original.gradient, original.count * byte_size(original.gradient_dtype), arithmetic.context());
    arithmetic.context().finish();
    TileMemory tile = layout_of(place).layout_of(place.range.count).tile(copy.state.data());
    tile.parameter = copy.parameter.data();
    tile.gradient = gradient.data();
    tile.gradient_dtype = original.gradient_dtype;
    tile.count = original.count;
    tile.first_index = original.first_index;
    tile.rounding_stream = original.rounding_stream;
    backend_->update(tile, runs_in(arithmetic.runs_of(op, step), place.range), step.groups);
    return copy;
  }

  // Returns an empty string if there is none.
  std::string first_difference(const Copy& expected, const Copy& found, const Place& place) const {
    const auto at = [](const std::vector<std::byte>& one, const std::vector<std::byte>& other) {
      return static_cast<std::size_t>(std::ranges::mismatch(one, other).in1 - one.begin());
    };
    if (const std::size_t byte = at(expected.parameter, found.parameter); byte < expected.parameter.size()) {
      return fmt::format("the parameter, element {}",
                         place.range.first + byte / byte_size(plan_.model().units[place.unit].dtype));
    }
    const std::size_t byte = at(expected.state, found.state);
    const optim::StateLayout copy_layout = layout_of(place).layout_of(place.range.count);
    const std::vector<optim::StateField> in_tile = layout_of(place).fields_of(place.range.first, place.range.count);
    for (std::size_t i = 0; i < in_tile.size(); ++i) {
      const optim::StateField& part = copy_layout.fields()[i];
      // Elements before it in the tile's part.
      const std::size_t before = in_tile[i].offset - layout_of(place).fields()[i].offset;
      if (byte >= part.offset && byte < part.offset + part.bytes) {
        return fmt::format("the {}, byte {}", part.name, before + byte - part.offset);
      }
    }
    return "";
  }

  void require_same(const Copy& expected, const Copy& found, const Place& place, std::uint64_t step,
                    const char* what) const {
    const std::string difference = first_difference(expected, found, place);
    require(difference.empty(), Code::wrong_bits, [&] {
      const Unit& unit = plan_.model().units[place.unit];
      const UnitLayout& layout = plan_.layout().units[place.unit];
      const Range range{layout.tiles[place.tile].first + place.range.first, place.range.count};
      std::vector<std::string_view> names;
      for (const TensorPart& part :
           tensors_in(unit, layout, layout.trained, plan_.input().rank_in_shard_group, range)) {
        names.push_back(unit.tensors[part.tensor].name);
      }
      return Problem{.what = fmt::format("{}, first in {} of the tile", what, difference),
                     .where = fmt::format("step {}, rank {}, tile {}, which holds parts of {}", step, rank_, place.tile,
                                          fmt::join(names, ", "))};
    });
  }

  const CompiledPlan& plan_;
  std::size_t every_;
  std::size_t rank_;
  std::vector<Place> places_{};  // the places of this rank
  std::unique_ptr<kernels::Backend> backend_;
  mutable std::mutex mutex_;
  std::map<const Place*, Copy> left_{};  // bits that checked updates left
  std::size_t checked_ = 0;
};

}  // namespace ballast

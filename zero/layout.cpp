#include "zero/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "kernels/runtime/error.h"
#include "kernels/runtime/round_up.h"
#include "kernels/state_math.h"

namespace ballast {
namespace {

std::vector<Range> cut(std::size_t elements, std::size_t tile_elements) {
  std::vector<Range> tiles;
  for (std::size_t first = 0; first < elements; first += tile_elements) {
    tiles.push_back({first, std::min(tile_elements, elements - first)});
  }
  return tiles;
}

UnitLayout lay_out(const Unit& unit, std::size_t shards, std::size_t tile_elements) {
  UnitLayout layout;
  std::size_t end = 0;
  for (const Tensor& tensor : unit.tensors) {
    layout.tensor_begin.push_back(end);
    end = round_up(end + tensor.elements(), kernels::group_size);
  }
  layout.shard = round_up((end + shards - 1) / shards, kernels::group_size);
  layout.elements = layout.shard * shards;
  layout.tiles = cut(layout.shard, tile_elements);
  return layout;
}

}  // namespace

std::size_t Tensor::elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>());
}

Layout make_layout(const Model& model, std::size_t shards, std::size_t tile_elements) {
  require(tile_elements > 0 && tile_elements % kernels::group_size == 0, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("tiles of {} elements were asked for", tile_elements),
                   .needed = fmt::format("a multiple of {}", kernels::group_size)};
  });
  require(shards > 0, Code::bad_argument,
          [] { return Problem{.what = "a layout for no ranks was asked for", .needed = "at least one shard"}; });
  Layout layout{.shards = shards, .tile_elements = tile_elements, .units = {}};
  for (const Unit& unit : model.units) {
    layout.units.push_back(lay_out(unit, shards, tile_elements));
  }
  return layout;
}

std::vector<kernels::Run> runs_in(const Unit& unit, const UnitLayout& layout, Range range) {
  std::vector<kernels::Run> runs;
  const std::size_t end = range.first + range.count;
  for (std::size_t i = 0; i < unit.tensors.size(); ++i) {
    const std::size_t from = std::max(layout.tensor_begin[i], range.first);
    const std::size_t to = std::min(layout.tensor_begin[i] + unit.tensors[i].elements(), end);
    if (from < to) {
      runs.push_back({from - range.first, to - from, unit.tensors[i].group});
    }
  }
  return runs;
}

}  // namespace ballast

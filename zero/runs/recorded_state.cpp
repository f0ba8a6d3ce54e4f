#include "zero/runs/recorded_state.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string_view>

#include "offload/checksum.h"
#include "zero/checkpoint/checkpoint.h"
#include "zero/plan/names_in_files.h"
#include "zero/plan/state_parts.h"

namespace ballast {
namespace {

Model model_of(const SavedCheckpoint& saved) {
  Model model;
  for (const SavedLayout::Unit& unit : saved.layout->units) {
    Unit& made = model.units.emplace_back();
    for (const std::string& name : unit.tensors) {
      const SavedTensor& tensor = saved.tensors.at(name);
      made.dtype = tensor.parameter_dtype(name);
      made.tensors.push_back({.name = name, .shape = tensor.shape, .frozen = !tensor.kind});
    }
  }
  return model;
}

std::size_t largest_tile_in(const SavedLayout& layout) {
  std::size_t largest = 0;
  for (const SavedLayout::Unit& unit : layout.units)
    largest = std::max(largest, unit.tile_elements);
  return largest;
}

Layout layout_of(const SavedCheckpoint& saved, const Model& model) {
  const std::size_t tile = largest_tile_in(*saved.layout);
  require(tile > 0 && tile % group_size == 0, Code::bad_record,
          [] { return Problem{.what = "cannot use the manifest of a run: its tiles are no whole groups"}; });
  return make_layout(model, saved.layout->placement.shards, tile);
}

BlockOptions block_options_of(const SavedCheckpoint& saved) {
  const auto& moments = saved.optimizers.front().moments;
  BlockOptions options{.names = {.momentum = moments.contains("momentum") ? "momentum" : "",
                                 .variance = moments.contains("variance") ? "variance" : "",
                                 .own_values = saved.layout->own_values},
                       .full_records = true};
  for (const auto& [name, tensor] : saved.tensors) {
    if (tensor.kind && tensor.kind->parameter == DType::bf16) options.format = *tensor.kind->format;
  }
  return options;
}

// The rule and the tensors, in the order of names, each in one line of an error.
std::vector<std::string> lasting_facts(const SavedCheckpoint& saved, bool frozen_too) {
  std::vector<std::string> facts{fmt::format("the update rule {}", saved.optimizers.front().optimizer)};
  for (const auto& [name, tensor] : saved.tensors) {
    if (tensor.kind || frozen_too)
      facts.push_back(
          fmt::format("{}parameter {} [{}]", tensor.kind ? "" : "frozen ", name, fmt::join(tensor.shape, ", ")));
  }
  for (std::string& fact : facts)
    std::ranges::replace_if(
        fact, [](unsigned char each) { return each < ' '; }, '?');
  return facts;
}

bool has_frozen(const SavedCheckpoint& saved) {
  return std::ranges::any_of(saved.tensors, [](const auto& each) { return !each.second.kind; });
}

// The first fact that others lack.
std::optional<std::string> first_own(const std::vector<std::string>& facts, const std::vector<std::string>& others) {
  const std::set<std::string_view> known(others.begin(), others.end());
  const auto found = std::ranges::find_if(facts, [&](const std::string& fact) { return !known.contains(fact); });
  return found == facts.end() ? std::nullopt : std::optional(*found);
}

}  // namespace

std::string describe(const CompiledPlan& plan) {
  const auto names = names_in_runs(plan.model());
  SavedCheckpoint run = saved_of(plan, names, 0);
  run.layout = {.placement = plan.placement(), .own_values = plan.names().own_values};
  for (std::size_t unit = 0; unit < names.size(); ++unit)
    run.layout->units.push_back({names[unit], plan.layout().units[unit].tile_elements});
  return run_manifest_of(run);
}

std::uint64_t digest_of(const std::string& manifest) { return offload::checksum(std::as_bytes(std::span(manifest))); }

std::optional<Difference> first_obstacle(const SavedCheckpoint& run, const CompiledPlan& plan) {
  const SavedCheckpoint own = saved_of(plan, names_in_runs(plan.model()), 0);
  const bool frozen_too = has_frozen(run) && has_frozen(own);
  const auto there = lasting_facts(run, frozen_too), here = lasting_facts(own, frozen_too);
  const auto one = first_own(there, here), other = first_own(here, there);
  if (!one && !other) return {};
  return Difference{one.value_or("nothing more"), other.value_or("nothing more")};
}

std::optional<RecordedState> RecordedState::of(const std::string& manifest) {
  try {
    return RecordedState(parse_run_manifest(manifest, "the manifest of a run"));
  } catch (const Error&) {
    return {};
  }
}

RecordedState::RecordedState(SavedCheckpoint saved)
    : saved_(std::move(saved)),
      model_(model_of(saved_)),
      layout_(layout_of(saved_, model_)),
      blocks_(model_, layout_, placement(), block_options_of(saved_)) {
  const auto require_cut = [](bool is_so) {
    require(is_so, Code::bad_record, [] {
      return Problem{.what = "cannot use the manifest of a run: its units are not cut or kept as it says"};
    });
  };
  for (std::size_t unit = 0; unit < layout_.units.size(); ++unit) {
    const SavedLayout::Unit& described = saved_.layout->units[unit];
    require_cut(described.tile_elements == record_elements(unit));
    first_record_.push_back(std::exchange(records_, records_ + layout_.units[unit].tiles.size()));
    for (std::size_t tensor = 0; tensor < described.tensors.size(); ++tensor) {
      const std::string& name = described.tensors[tensor];
      auto& kind = saved_.tensors.at(name).kind;
      if (!kind) continue;
      std::byte anywhere{};
      const TileMemory tile = blocks_.recorded(unit, 0, 0, &anywhere);
      const ChunkKind kept = kind_of(tile, false);
      require_cut(kind->parameter == kept.parameter && kind->format == kept.format && kind->momentum == kept.momentum &&
                  kind->variance == kept.variance);
      kind->own_values = tile.own.count;
      places_[name] = {unit, tensor};
    }
  }
}

std::size_t RecordedState::largest_tile() const { return largest_tile_in(*saved_.layout); }

StateFormat RecordedState::format() const { return block_options_of(saved_).format; }

std::vector<std::string> RecordedState::trained() const {
  std::vector<std::string> trained;
  for (const SavedLayout::Unit& unit : saved_.layout->units)
    std::ranges::copy_if(unit.tensors, std::back_inserter(trained),
                         [&](const std::string& name) { return places_.contains(name); });
  return trained;
}

std::vector<RecordedState::Part> RecordedState::parts_of(const std::string& name, Range range) const {
  const auto [unit, tensor] = places_.at(name);
  const UnitLayout& layout = layout_.units[unit];
  std::vector<Part> parts;
  for (const TensorPart& owned : owners_of(model_.units[unit], layout, tensor, range)) {
    for (std::size_t done = 0; done < owned.range.count;) {  // each turn takes one tile of the shard
      const std::size_t in_shard = owned.in_shard + done;
      const std::size_t tile = in_shard / layout.tile_elements;
      const std::size_t count = std::min(owned.range.count - done, layout.tiles[tile].end() - in_shard);
      parts.push_back({owned.rank,
                       first_record_[unit] + tile,
                       in_shard - layout.tiles[tile].first,
                       {owned.range.first + done, count}});
      done += count;
    }
  }
  return parts;
}

}  // namespace ballast

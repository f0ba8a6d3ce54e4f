#include "zero/plan/parameter_gathers.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>

#include "kernels/runtime/sizes.h"

namespace ballast {

ParameterGathers::ParameterGathers(const CompileContext& context, const RecordStream& records)
    : context_(context),
      records_(records),
      gathered_(context.slots.gathered_bytes(), context.uses),
      pieces_(context, gathered_) {}

bool ParameterGathers::ensure_gathered(std::size_t unit, std::size_t now, std::size_t position) {
  if (!context_.slots.is_gathered_per_use(unit)) return true;
  const Visit& visit = context_.trace()[position % context_.trace().size()];
  if (const auto gathered = gathered_.find(unit)) {
    if (gathered->exact == visit.exact) return true;
    if (context_.uses.next(unit, now) < position) return false;
    gathered_.drop(unit);
  }
  if (!gathered_.make_room(unit, context_.slots.full_bytes(unit), now, position)) return false;
  gather(unit, visit);
  return true;
}

bool ParameterGathers::has_spare_memory(std::size_t unit) const {
  return !context_.slots.is_gathered_per_use(unit) || gathered_.find(unit) ||
         gathered_.has_gap(context_.slots.full_bytes(unit));
}

void ParameterGathers::ensure_chain_gathered(std::size_t position) {
  const std::size_t end = context_.uses.end_of_chain(position);
  const auto gather_all = [&] {
    for (std::size_t i = position; i < end; ++i) {
      if (!ensure_gathered(context_.trace()[i].unit, position, i)) return false;
    }
    return true;
  };
  if (gather_all()) return;
  gathered_.clear();
  require(gather_all(), Code::memory_budget, [&] {
    return Problem{.what = "cannot gather the parameters: the memory for gathered parameters is too small",
                   .where = "unit " + context_.input.model.units[context_.trace()[end - 1].unit].name,
                   .needed = human_bytes(chain_bytes(position)),
                   .available = human_bytes(context_.slots.gathered_bytes()),
                   .remedy = "Give gathered_bytes more, or cut the model into smaller units."};
  });
}

std::size_t ParameterGathers::chain_bytes(std::size_t position) const {
  std::size_t bytes = 0;
  for (std::size_t i = position; i < context_.uses.end_of_chain(position); ++i) {
    const std::size_t unit = context_.trace()[i].unit;
    if (context_.slots.is_gathered_per_use(unit)) bytes += context_.slots.full_bytes(unit);
  }
  return bytes;
}

// Prefetches into the next micro-step, but not into the next step: parameters change before that.
void ParameterGathers::prefetch(std::size_t micro_step, std::size_t position) {
  const CompileInput& in = context_.input;
  const Trace& trace = context_.trace();
  const std::size_t known = micro_step + 1 < in.micro_steps ? 2 * trace.size() : trace.size();
  const std::size_t end = context_.uses.end_of_units(position, in.schedule.prefetch, known);
  for (std::size_t i = position + 1; i < end; ++i) {
    if (!ensure_gathered(trace[i % trace.size()].unit, position, i)) return;
  }
}

void ParameterGathers::gather(std::size_t unit, const Visit& visit) {
  const bool on_device = context_.residence(unit).parameters == Tier::device;
  if (!on_device) upload_shard(unit, visit.phase);
  for (const Section& section : {context_.layout(unit).trained, context_.layout(unit).frozen}) {
    if (section.shard == 0 || section.shards == 1) continue;
    context_.builder.add({.kind = OpKind::gather,
                          .lane = Lane::gather,
                          .phase = visit.phase,
                          .unit = unit,
                          .from = on_device ? pieces_.kept(unit, section) : pieces_.shard(unit, section),
                          .to = pieces_.full(unit, section),
                          .codes = visit.exact ? Codes{} : context_.slots.gather_codes(unit, section)});
  }
}

void ParameterGathers::gather_kept(std::size_t unit) {
  const Section& trained = context_.layout(unit).trained;
  if (context_.slots.is_gathered_per_use(unit)) return gather_replica(unit, trained);
  if (trained.shard == 0 || trained.shards == 1) return;
  context_.builder.add({.kind = OpKind::gather,
                        .lane = Lane::gather,
                        .unit = unit,
                        .from = pieces_.shard(unit, trained),
                        .to = pieces_.full(unit, trained)});
}

void ParameterGathers::gather_kept_frozen(std::size_t unit) {
  if (context_.slots.is_gathered_per_use(unit)) gather_replica(unit, context_.layout(unit).frozen);
}

// The ranks with the same position in their groups gather each other's shards. Their lane is that of the reductions,
// whose groups of ranks are the same.
void ParameterGathers::gather_replica(std::size_t unit, const Section& section) {
  if (context_.input.placement.parameter_replicas == 1 || section.shard == 0) return;
  context_.builder.add({.kind = OpKind::gather,
                        .lane = Lane::reduce,
                        .unit = unit,
                        .ranks = Ranks::replica_group,
                        .from = pieces_.kept_shard(unit, section),
                        .to = pieces_.kept(unit, section)});
}

// Uploads this rank's shard from the host, or from records, to its part of the full parameters.
void ParameterGathers::upload_shard(std::size_t unit, Phase phase) {
  const UnitLayout& layout = context_.layout(unit);
  const bool on_drive = context_.residence(unit).parameters == Tier::nvme;
  const std::size_t tiles = layout.tiles.size() + (on_drive ? layout.frozen_tiles.size() : 0);
  for (std::size_t tile = 0; tile < tiles; ++tile) {
    upload_tile(unit, tile, phase);
  }
  if (on_drive || layout.frozen.shard == 0) return;
  context_.builder.add({.kind = OpKind::upload,
                        .lane = Lane::upload,
                        .phase = phase,
                        .unit = unit,
                        .from = {context_.slots.of(unit).frozen, 0, layout.frozen.shard * context_.width(unit)},
                        .to = pieces_.shard(unit, layout.frozen)});
}

void ParameterGathers::upload_tile(std::size_t unit, std::size_t tile, Phase phase) {
  const UnitSlots& slots = context_.slots.of(unit);
  const std::size_t width = context_.width(unit);
  const Range range = context_.layout(unit).of_rank(context_.input.rank_in_shard_group, tile);
  const std::size_t bytes = range.count * width;
  Piece from;
  if (context_.residence(unit).parameters == Tier::nvme) {
    const Piece record = context_.slots.rings.first_regions.next();
    fetch({unit, tile}, phase, record);
    from = record.part(context_.input.blocks.records().payload, bytes);
  } else {
    const bool in_block = context_.residence(unit).state[tile] == Tier::host;
    from = (in_block ? slots.blocks : slots.copies)[tile].part(0, bytes);
  }
  context_.builder.add({.kind = OpKind::upload,
                        .lane = Lane::upload,
                        .phase = phase,
                        .unit = unit,
                        .tile = tile,
                        .from = from,
                        .to = pieces_.full(unit).part(range.first * width, bytes)});
}

// A record can be read as soon as it is written. Its commit need not be waited for.
void ParameterGathers::fetch(const TileName& name, Phase phase, const Piece& to) {
  const std::size_t written = records_.written(name);
  context_.builder.add(
      {.kind = OpKind::read_first, .lane = Lane::fetch, .phase = phase, .unit = name.unit, .tile = name.tile, .to = to},
      written == none ? std::vector<std::size_t>{} : std::vector{written});
}

}  // namespace ballast

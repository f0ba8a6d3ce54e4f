#include "zero/plan/compile_input.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "zero/plan/collective_memory.h"
#include "zero/plan/matrix_homes.h"

namespace ballast {

Trace visits_of(const Model& model, std::size_t unit, Phase phase, bool exact) {
  Trace visits;
  for (const Tie& tie : model.units[unit].ties) {
    const Visit owner{tie.unit, phase, true, exact};
    if (std::ranges::find(visits, owner) == visits.end()) visits.push_back(owner);
  }
  visits.push_back({unit, phase, false, exact});
  return visits;
}

Trace declared_order(const Model& model) {
  Trace trace;
  const auto use = [&](std::size_t unit, Phase phase) {
    const Trace visits = visits_of(model, unit, phase);
    trace.insert(trace.end(), visits.begin(), visits.end());
  };
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    use(unit, Phase::forward);
  }
  for (std::size_t unit = model.units.size(); unit-- > 0;) {
    use(unit, Phase::backward);
  }
  return trace;
}

Uses::Uses(Trace trace, std::size_t units)
    : trace_(std::move(trace)),
      positions_(units),
      backward_(units, 0),
      last_backward_(units, none),
      rows_(units, 0),
      row_ends_(trace_.size()) {
  for (std::size_t i = 0; i < trace_.size(); ++i) {
    const Visit& visit = trace_[i];
    require(visit.unit < units && visit.phase != Phase::step, Code::bad_argument, [&] {
      return Problem{.what = fmt::format("a trace visits unit {} in {}", visit.unit, name(visit.phase)),
                     .needed = fmt::format("a unit below {} in forward or backward", units)};
    });
    positions_[visit.unit].push_back(i);
    has_forward_ = has_forward_ || visit.phase == Phase::forward;
    if (visit.phase == Phase::backward) {
      ++backward_[visit.unit];
      last_backward_[visit.unit] = i;
      const bool continues = i > 0 && trace_[i - 1] == visit;
      rows_[visit.unit] += continues ? 0 : 1;
    }
  }
  for (std::size_t i = trace_.size(); i-- > 0;)
    row_ends_[i] = i + 1 < trace_.size() && trace_[i] == trace_[i + 1] ? row_ends_[i + 1] : i + 1;
}

std::size_t Uses::next(std::size_t unit, std::size_t from) const {
  const std::vector<std::size_t>& positions = positions_[unit];
  if (positions.empty()) return none;
  const std::size_t step = from / trace_.size();
  const auto at = std::ranges::lower_bound(positions, from % trace_.size());
  return at != positions.end() ? step * trace_.size() + *at : (step + 1) * trace_.size() + positions.front();
}

std::size_t Uses::end_of_chain(std::size_t position) const {
  while (position < trace_.size() && trace_[position].held)
    ++position;
  return position + 1;
}

std::size_t Uses::end_of_row(std::size_t position) const {
  const std::size_t place = position % trace_.size();
  return position - place + row_ends_[place];
}

std::size_t Uses::end_of_units(std::size_t position, std::size_t further, std::size_t end) const {
  std::vector<std::size_t> seen;
  for (std::size_t i = position; i < end; i = end_of_row(i)) {
    const std::size_t unit = trace_[i % trace_.size()].unit;
    if (std::ranges::find(seen, unit) != seen.end()) continue;  // units of one block take turns
    if (seen.size() > further) return i;
    seen.push_back(unit);
  }
  return end;
}

std::vector<std::size_t> Uses::by_first_visit() const {
  std::vector<std::size_t> units(positions_.size());
  std::iota(units.begin(), units.end(), std::size_t{0});
  std::ranges::stable_sort(units, {}, [&](std::size_t unit) { return next(unit, 0); });
  return units;
}

namespace {

std::size_t rank_in_shard_group(const PlanOptions& options) {
  check(options.placement);
  const std::size_t ranks = options.placement.ranks();
  require(options.rank < ranks, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot plan for rank {}", options.rank),
                   .needed = fmt::format("a rank below {}", ranks)};
  });
  return shard_of(options.placement, options.rank);
}

// Records of a run have the same names for each part, and replicas of a part are not told apart.
void check_parts(const CompileInput& input) {
  for (const Unit& unit : input.model.units) {
    if (unit.parts == 1) continue;
    const auto refuse_if = [&](bool is_so, std::string_view with, std::string_view needed) {
      require(!is_so, Code::unsupported, [&] {
        return Problem{.what = fmt::format("cannot train parts of a unit, such as experts, with {}", with),
                       .where = "unit " + unit.name,
                       .needed = std::string(needed)};
      });
    };
    refuse_if(unit.parts != parts_of(input.model), "units of other numbers of parts", "one number of parts");
    refuse_if(input.placement.groups() > 1, "copies of the state or of the parameters", "replicas=1");
    refuse_if(input.full_records, "the records of a run", "a checkpoint in place of a run");
    refuse_if(input.needs_matrices(), "a rule of whole matrices", "a rule of single elements");
  }
}

// Random bits belong to groups of elements, so a learning rate begins at one.
bool begins_at_a_group(const MatrixBlocks& blocks) { return blocks.first % group_size == 0; }

void check_matrices(const Model& model) {
  for (const Unit& unit : model.units) {
    for (const Tensor& tensor : unit.tensors) {
      if (tensor.frozen) continue;
      const std::string where = fmt::format("unit {}, tensor {}", unit.name, tensor.name);
      require(is_matrix(tensor), Code::unsupported, [&] {
        return Problem{.what = "cannot orthogonalize a tensor that is not a matrix",
                       .where = where,
                       .needed = "two dimensions",
                       .available = fmt::format("shape [{}]", fmt::join(tensor.shape, ", ")),
                       .remedy = "Train it with a rule of elements, such as AdamW, in a training of its own."};
      });
      require(std::ranges::all_of(blocks_of(tensor), begins_at_a_group), Code::unsupported, [&] {
        return Problem{.what = fmt::format("cannot orthogonalize blocks of {} rows apart: blocks of other shapes begin "
                                           "inside of a group of {} elements",
                                           fmt::join(tensor.blocks, ", "), group_size),
                       .where = where,
                       .needed = fmt::format("rows times columns that are multiples of {}", group_size)};
      });
    }
  }
}

// Returns the same uses, each with the owners of its tied tensors held, whether the trainer has named those or not.
Trace with_owners(const Model& model, const Trace& uses) {
  Trace trace;
  for (const Visit& visit : uses) {
    if (visit.held) continue;
    const bool is_known = visit.unit < model.units.size();  // check() refuses others
    const Trace visits = is_known ? visits_of(model, visit.unit, visit.phase, visit.exact) : Trace{visit};
    trace.insert(trace.end(), visits.begin(), visits.end());
  }
  return trace;
}

// Makes one pass of all micro-steps, for Schedule::layer_major: each use comes as often as there are micro-steps, with the units that
// are held for it.
PlanOptions ordered(PlanOptions options, const Model& model) {
  options.trace = with_owners(model, options.trace);
  if (!options.schedule.layer_major || options.micro_steps <= 1) return options;
  const Trace of_micro_step = options.trace.empty() ? declared_order(model) : std::exchange(options.trace, {});
  for (auto chain = of_micro_step.begin(); chain != of_micro_step.end();) {
    const auto end =
        std::next(std::find_if(chain, of_micro_step.end(), [](const Visit& visit) { return !visit.held; }));
    for (std::size_t micro_step = 0; micro_step < options.micro_steps; ++micro_step)
      options.trace.insert(options.trace.end(), chain, end);
    chain = end;
  }
  options.in_one_pass = std::exchange(options.micro_steps, 1);
  return options;
}

}  // namespace

PlanOptions options_of(const ChoiceInput& question, const Placement& placement, std::size_t rank) {
  return {.placement = placement,
          .rank = rank,
          .ranks_per_host = question.machine.ranks_per_host,
          .shares_memory = question.machine.ranks_per_host == 0,
          .tile_elements = question.tile_elements,
          .micro_steps = question.micro_steps,
          .format = question.format,
          .gradient_format = question.gradient_format,
          .names = question.names,
          .orthogonalization_steps = question.orthogonalization_steps,
          .trace = question.trace,
          .schedule = question.schedule,
          .wire = question.wire,
          .rates = question.machine.transfer_rates(),
          .full_records = question.full_records,
          .host_is_device = question.machine.host_is_device};
}

CutModel::CutModel(const Model& model, const PlanOptions& options)
    : layout(lay_out(model, options.placement, options.tile_elements)),
      blocks(model, layout, options.placement,
             {.format = options.format, .names = options.names, .full_records = options.full_records}),
      input{{ordered(options, model)}, model, layout, blocks, rank_in_shard_group(options)} {}

Op part_on_tile(const CompileInput& input, const Op& op, std::size_t tile) {
  const std::vector<Range>& tiles = input.layout.units[op.unit].tiles;
  const std::size_t first = tiles[op.tile].first;
  const std::size_t elements = tiles[op.tile + op.tiles - 1].end() - first;
  const auto part = [&](const Piece& piece) {
    const std::size_t width = piece.bytes / elements;
    return piece.part((tiles[tile].first - first) * width, tiles[tile].count * width);
  };
  Op on_tile = op;
  on_tile.tile = tile;
  on_tile.tiles = 1;
  on_tile.from = part(op.from);
  on_tile.to = part(op.to);
  const std::size_t state = op.state.bytes / op.tiles;
  on_tile.state = op.state.part((tile - op.tile) * state, state);
  return on_tile;
}

Trace trace_of(const CompileInput& input) { return input.trace.empty() ? declared_order(input.model) : input.trace; }

void check(const CompileInput& input) {
  check(input.model);
  check(input.placement);
  check(input.wire, input.placement);
  const auto refuse = [](std::string what, std::string needed) {
    fail(Code::bad_argument, {.what = std::move(what), .needed = std::move(needed)});
  };
  if (input.model.units.size() != input.layout.units.size() || input.layout.shards != input.placement.shards) {
    refuse(
        fmt::format("cannot compile: the model has {} units on {} shards, but its layout has {} on {}",
                    input.model.units.size(), input.placement.shards, input.layout.units.size(), input.layout.shards),
        "the layout that lay_out() gives for this model and placement");
  }
  if (input.rank_in_shard_group >= input.placement.shards) {
    refuse(fmt::format("cannot compile: there is no rank {} in the shard group", input.rank_in_shard_group),
           fmt::format("a rank below {}", input.placement.shards));
  }
  if (input.needs_matrices()) check_matrices(input.model);
  check_parts(input);
  if (input.micro_steps == 0) refuse("cannot compile: the step has no micro-steps", "at least one");
  if (input.schedule.staging_slots == 0) refuse("cannot compile: there are no slots for records", "at least one");
  if (input.schedule.update_in_backward && input.micro_steps > 1) {
    refuse(fmt::format("cannot update in the backward pass of {} micro-steps", input.micro_steps),
           "one micro-step, or updates after the backward pass");
  }
}

}  // namespace ballast

#include "zero/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "kernels/random_math.h"

namespace ballast {
namespace {

void require_records(const Program& program, const offload::RecordStore* records) {
  const bool needed = std::ranges::any_of(program.ops, [](const Op& op) { return op.kind == OpKind::read; });
  require(records != nullptr || !needed, Code::bad_argument, [] {
    return Problem{.what = "a program that keeps state on a drive got no records to keep it in",
                   .needed = "EngineParts::records"};
  });
}

}  // namespace

Engine::Engine(const EngineParts& parts) : parts_(parts) {
  require_records(parts.program, parts.records);
  for (const Slot& slot : parts.program.slots) {
    slots_.push_back(allocate(parts.accounts, {.bytes = slot.bytes(), .owner = slot.name}));
  }
  if (parts.records != nullptr) {
    staging_.emplace(parts.accounts, "records", offload::StagingPool::Shape{1, parts.records->record_bytes()});
  }
  std::size_t records = 0;
  for (const UnitLayout& unit : parts.layout.units) {
    first_record_.push_back(records);
    records += unit.tiles.size();
  }
}

View Engine::view(const Piece& piece) {
  return slots_[piece.slot].view(parts_.program.slots[piece.slot].dtype).part(piece.first, piece.count);
}

Communicator& Engine::ranks(const Op& op) {
  return op.ranks == Ranks::shard_group ? parts_.shard_group : parts_.replica_group;
}

std::size_t Engine::record(const Op& op) const { return first_record_[op.unit] + op.tile; }

// Up to the trainer's next turn, which must be the one it takes.
Lease Engine::use(std::size_t unit, Phase phase) {
  const std::vector<Op>& ops = parts_.program.ops;
  const std::vector<Unit>& units = parts_.model.units;
  require(unit < units.size(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("the trainer asked for unit {}", unit),
                   .needed = fmt::format("a unit below {}", units.size())};
  });
  while (ops[next_].kind != OpKind::use && ops[next_].kind != OpKind::agree) {
    run_next();
  }
  const Op& op = ops[next_];
  require(op.kind == OpKind::use && op.unit == unit && op.phase == phase, Code::out_of_order, [&] {
    return Problem{.what = fmt::format("the trainer asked for unit {} in {}", units[unit].name, name(phase)),
                   .needed = op.kind == OpKind::use ? fmt::format("unit {} in {}", units[op.unit].name, name(op.phase))
                                                    : "a step, as all units have been used"};
  });
  ++next_;
  return {view(op.from), op.to.slot == none ? View{} : view(op.to)};
}

// Before anything changes: past the agreement a rank that stops would leave the others a step ahead.
void Engine::check(const StepOptions& options) const {
  for (const Unit& unit : parts_.model.units) {
    for (const Tensor& tensor : unit.tensors) {
      require(tensor.group < options.groups.size(), Code::bad_argument, [&] {
        return Problem{.what = fmt::format("a step was asked for with {} parameter groups", options.groups.size()),
                       .where = fmt::format("unit {}, tensor {}", unit.name, tensor.name),
                       .needed = fmt::format("group {}", tensor.group)};
      });
    }
  }
  for (const optim::Rule& rule : options.groups) {
    optim::check(rule);
  }
}

optim::Decision Engine::step(const StepOptions& options) {
  const std::vector<Op>& ops = parts_.program.ops;
  check(options);
  options_ = options;
  while (next_ < ops.size()) {
    require(ops[next_].kind != OpKind::use, Code::out_of_order, [&] {
      return Problem{.what = "a step was asked for before every unit was used",
                     .needed = fmt::format("unit {} first", parts_.model.units[ops[next_].unit].name)};
    });
    run_next();
  }
  next_ = 0;
  return decision_;
}

void Engine::run_next() {
  run(parts_.program.ops[next_]);
  ++next_;
}

void Engine::run(const Op& op) {
  switch (op.kind) {
    case OpKind::clear: return parts_.backend.fill(view(op.to), 0.0f);
    case OpKind::gather: return ranks(op).all_gather(view(op.from), view(op.to));
    case OpKind::use: return;
    // Numbers that must not be used any more are made to be noticed.
    case OpKind::release: return parts_.backend.fill(view(op.to), std::numeric_limits<float>::quiet_NaN());
    case OpKind::reduce:
      return op.ranks == Ranks::shard_group ? ranks(op).reduce_scatter(view(op.from), view(op.to))
                                            : ranks(op).all_reduce(view(op.from), view(op.to));
    case OpKind::norm: return parts_.backend.sum_of_squares(view(op.from), &norm_);
    case OpKind::agree: return agree();
    case OpKind::read: return read(op);
    case OpKind::update: return update(op);
    case OpKind::write: return write(op);
    case OpKind::commit:
      if (parts_.records != nullptr) parts_.records->commit(steps_);
      return;
  }
}

void Engine::read(const Op& op) {
  const auto record_of_tile = staging_->take("read");
  const auto payload = parts_.records->read(record(op), record_of_tile.bytes()).payload();
  std::ranges::copy(payload, view(op.to).as_bytes().begin());
}

void Engine::write(const Op& op) {
  const auto record_of_tile = staging_->take("write");
  std::ranges::copy(view(op.from).as_bytes(), parts_.records->payload(record_of_tile.bytes()).begin());
  parts_.records->write(record(op), record_of_tile.bytes()).wait();
}

void Engine::agree() {
  kernels::carry(norm_);
  kernels::ExactSum of_all = norm_;
  parts_.shard_group.all_reduce({reinterpret_cast<std::int64_t*>(&of_all), kernels::exact_sum_words});
  const double ranks = static_cast<double>(parts_.shard_group.size() * parts_.replica_group.size());
  decision_ = optim::decide({.sum_of_squares = kernels::value(of_all),
                             .loss_scale = options_.loss_scale,
                             .averaged_over = ranks * static_cast<double>(parts_.program.micro_steps)},
                            options_.max_norm);
  norm_ = {};
  group_steps_.clear();
  if (decision_.skip) return;
  ++steps_;
  for (const optim::Rule& rule : options_.groups) {
    group_steps_.push_back(optim::at(rule, {.number = steps_, .gradient_factor = decision_.gradient_factor}));
  }
}

// Where a tile of this rank's shard lies in its unit.
Range Engine::in_unit(const Op& op) const {
  const UnitLayout& layout = parts_.layout.units[op.unit];
  return {parts_.shard_group.rank() * layout.shard + layout.tiles[op.tile].first, op.to.count};
}

void Engine::update(const Op& op) {
  if (decision_.skip) return;
  const Range range = in_unit(op);
  kernels::UpdateTile tile = parts_.state.tile(view(op.state).data());
  tile.parameter = view(op.to).data();
  tile.gradient = view(op.from).data();
  tile.gradient_dtype = parts_.program.slots[op.from.slot].dtype;
  tile.count = range.count;
  tile.first_index = range.first;
  tile.rounding_stream = kernels::rounding_stream(0, op.unit, steps_);
  parts_.backend.update(tile, runs_in(parts_.model.units[op.unit], parts_.layout.units[op.unit], range), group_steps_);
}

void Engine::initialise(std::span<const ConstView> units) {
  require(units.size() == parts_.model.units.size(), Code::wrong_size, [&] {
    return Problem{.what = "the first parameters of another number of units were given",
                   .needed = fmt::format("{} units", parts_.model.units.size()),
                   .available = fmt::format("{} units", units.size())};
  });
  for (const Op& op : parts_.program.ops) {
    switch (op.kind) {
      case OpKind::use: parts_.backend.cast(units[op.unit], view(op.from)); break;
      case OpKind::update: set_parameters(op, units[op.unit]); break;
      case OpKind::read:
      case OpKind::write:
      case OpKind::commit: run(op); break;
      default: break;
    }
  }
}

void Engine::set_parameters(const Op& op, const ConstView& unit) {
  const Range range = in_unit(op);
  parts_.backend.cast(unit.part(range.first, range.count), view(op.to));
  const kernels::UpdateTile tile = parts_.state.tile(view(op.state).data());
  if (tile.format == kernels::StateFormat::fp32 && tile.master != nullptr) {
    parts_.backend.cast(view(op.to), View(tile.master, range.count, DType::fp32));
  }
}

}  // namespace ballast

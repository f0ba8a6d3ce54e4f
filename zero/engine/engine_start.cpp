// How an engine comes to its first state.
#include <algorithm>

#include "kernels/runtime/host_limits.h"
#include "zero/engine/engine.h"
#include "zero/engine/record_memory.h"

namespace ballast {
namespace {

// Host memory to make a piece's first bytes in: its own, or some for the moment where that is a GPU's, or nowhere.
class Draft {
 public:
  Draft(const Slots& slots, const Piece& piece, std::size_t bytes)
      : elsewhere_(piece.exists() && !slots.on_gpu(piece) ? 0 : bytes),
        bytes_(elsewhere_.empty() ? std::span(slots.data(piece), bytes) : std::span(elsewhere_)) {}
  Draft(Draft&&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }
  bool is_elsewhere() const { return !elsewhere_.empty(); }

 private:
  std::vector<std::byte> elsewhere_;
  std::span<std::byte> bytes_;
};

}  // namespace

void Engine::initialise(const ParameterSource& source) {
  std::optional<RecordMemory> records;
  if (parts_.plan.tiles_on_drive() > 0) records.emplace(program(), slots_);
  std::size_t unwritten = 0;
  for (const Home& home : program().homes) {
    unwritten += slots_.unwritten_bytes(home.parameters) + slots_.unwritten_bytes(home.state);
  }
  std::size_t unit = none;
  for (const Home& home : program().homes) {
    if (std::exchange(unit, home.unit) != home.unit) {  // other ranks of this machine take memory, too
      require_host_memory(unwritten, "the rest of what this rank keeps", read_host_limits());
    }
    home.on_drive ? fill_record(home, source, *records) : fill_home(home, source);
    unwritten -= slots_.unwritten_bytes(home.parameters) + slots_.unwritten_bytes(home.state);
  }
  if (records) records->finish();
  if (parts_.plan.tiles_on_drive() > 0) records_->commit(0);
  run_entry(true);
}

// A range of a unit, tensor by tensor. What is padding stays zero.
void Engine::load(std::size_t unit, const Range& range, const View& to, const ParameterSource& source) const {
  const std::vector<Tensor>& tensors = parts_.plan.model().units[unit].tensors;
  const UnitLayout& layout = parts_.plan.layout().units[unit];
  for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const std::size_t begin = layout.tensor_begin[tensor];
    const Range common = intersection(range, {begin, tensors[tensor].elements()});
    if (common.count == 0) continue;
    source(unit, tensor, {common.first - begin, common.count}, to.part(common.first - range.first, common.count));
  }
}

void Engine::fill_home(const Home& home, const ParameterSource& source) {
  const DType dtype = parts_.plan.model().units[home.unit].dtype;
  const Draft parameters(slots_, home.parameters, home.range.count * byte_size(dtype));
  const View values(parameters.bytes().data(), home.range.count, dtype);
  load(home.unit, home.range, values, source);
  if (home.state.exists()) {
    const Draft state(slots_, home.state, home.state.bytes);
    arithmetic(Lane::host).begin_state(home.unit, home.range.count, values, state.bytes());
    if (state.is_elsewhere()) put(home.state, state.bytes().data());
  }
  if (home.parameters.exists() && parameters.is_elsewhere()) put(home.parameters, values.data());
}

// From host memory, which may be changed when this returns.
void Engine::put(const Piece& to, const std::byte* from) const {
  const ExecContext& context = arithmetic(slots_.on_gpu(to) ? Lane::upload : Lane::host).context();
  context.copy(slots_.data(to), from, to.bytes);
  context.finish();
}

void Engine::fill_record(const Home& home, const ParameterSource& source, RecordMemory& memory) {
  const DType dtype = parts_.plan.model().units[home.unit].dtype;
  const BlockSizes sizes = parts_.plan.blocks().in_record(home.unit);
  const std::span<std::byte> record = memory.next();
  const std::span<std::byte> block = records_->block(record);
  std::vector<std::byte> elsewhere(sizes.parameter > 0 ? 0 : home.range.count * byte_size(dtype));
  const View parameters(elsewhere.empty() ? block.data() : elsewhere.data(), home.range.count, dtype);
  std::ranges::fill(block, std::byte{0});
  load(home.unit, home.range, parameters, source);
  arithmetic(Lane::host)
      .begin_state(home.unit, home.range.count, parameters, block.subspan(sizes.parameter, sizes.state));
  if (home.parameters.exists()) std::ranges::copy(parameters.as_bytes(), slots_.data(home.parameters));
  memory.is_written_by(records_->write(home.unit, home.tile, record));
}

void Engine::resume(const ParameterSource& frozen) {
  for (const Home& home : program().homes) {
    const bool whole = home.on_drive && parts_.plan.blocks().whole_records();
    require(whole || home.tile == none, Code::unsupported, [&] {
      return Problem{.what = "a training was to go on whose state, or parameters, are not on a drive",
                     .where = "unit " + parts_.plan.model().units[home.unit].name,
                     .needed = "all of the state in records, with the parameters: those of a run that has a name"};
    });
    if (home.tile == none) fill_frozen(home, frozen);
  }
  std::optional<RecordMemory> records;
  if (parts_.plan.tiles_on_drive() > 0) records.emplace(program(), slots_);
  for (const Home& home : program().homes) {
    if (home.on_drive) read_home(home, *records);
  }
  if (records_) steps_ = records_->step();
  run_entry(true);
}

void Engine::fill_frozen(const Home& home, const ParameterSource& frozen) {
  const UnitLayout& layout = parts_.plan.layout().units[home.unit];
  const DType dtype = parts_.plan.model().units[home.unit].dtype;
  const Range range = intersection(home.range, {layout.frozen.first, layout.frozen.count()});
  if (range.count == 0) return;
  const Piece piece =
      home.parameters.part((range.first - home.range.first) * byte_size(dtype), range.count * byte_size(dtype));
  const Draft draft(slots_, piece, piece.bytes);
  load(home.unit, range, View(draft.bytes().data(), range.count, dtype), frozen);
  if (draft.is_elsewhere()) put(piece, draft.bytes().data());
}

void Engine::read_home(const Home& home, RecordMemory& memory) {
  const std::span<std::byte> record = memory.next();
  const std::span<std::byte> block = records_->read(home.unit, home.tile, record).payload();
  keep_parameters(home, block.data());
}

// What has been under way is over.
void Engine::begin_program() {
  memory_ = bytes_by_tier(ledger_of(program(), parts_.plan.blocks().records()));
  for (Round& round : rounds_) {
    round.list = &program().ops;
    round.ops = std::vector<OpStatus>(round.list->size());
  }
}

void Engine::run_entry(bool with_records) {
  if (entry_.clock) entry_.clock->set();
  entry_.list = &program().entry;
  entry_.ops = std::vector<OpStatus>(entry_.list->size());
  for (std::size_t i = 0; i < entry_.ops.size(); ++i) {
    const Op& op = (*entry_.list)[i];
    if (with_records || op.kind != OpKind::read) issue(op, entry_.ops[i], entry_);
  }
  wait_all(entry_);
  count_on_gpu(entry_);
  for (std::size_t i = 0; i < entry_.ops.size(); ++i) {  // checks what stays; what was used has been checked
    if ((*entry_.list)[i].kind == OpKind::read && entry_.ops[i].read) entry_.ops[i].read->payload();
  }
  for (Round& round : rounds_) {
    if (round.clock) round.clock->set();
  }
  began_ = true;
}

}  // namespace ballast

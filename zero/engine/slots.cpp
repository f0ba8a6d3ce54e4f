#include "zero/engine/slots.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>

#include "kernels/runtime/host_limits.h"
#include "zero/engine/home_memory.h"

namespace ballast {
namespace {

std::set<std::size_t> slots_of_records(const Program& program) {
  std::set<std::size_t> slots;
  for (const std::vector<Op>* ops : {&program.entry, &program.ops}) {
    for (const Op& op : *ops) {
      if (op.kind == OpKind::read || op.kind == OpKind::read_first) slots.insert(op.to.slot);
    }
  }
  return slots;
}

std::set<std::size_t> slots_of(const Program& program, Piece Home::*what) {
  std::set<std::size_t> slots;
  for (const Home& home : program.homes) {
    if ((home.*what).exists()) slots.insert((home.*what).slot);
  }
  return slots;
}

std::set<std::size_t> slots_of_initial_state(const Program& program) {
  std::set<std::size_t> slots = slots_of(program, &Home::parameters);
  slots.merge(slots_of(program, &Home::state));
  return slots;
}

// Slots that other ranks read. A slot of one unit is left out: it may be as large as the model, and every page that
// another rank reads counts as memory of that rank, too.
std::set<std::size_t> exchanged_slots(const Program& program) {
  std::map<std::size_t, std::set<std::size_t>> units;  // the key is the slot
  for (const Op& op : program.ops) {
    if (op.codes.exist()) {  // other ranks read codes in place of values
      units[op.codes.memory.slot].insert(op.unit);
      continue;
    }
    if (op.kind == OpKind::gather) units[op.to.slot].insert(op.unit);
    if (op.kind != OpKind::reduce) continue;
    units[op.from.slot].insert(op.unit);
    if (op.ranks == Ranks::replica_group) units[op.to.slot].insert(op.unit);  // it gathers parts of the sum
  }
  std::set<std::size_t> slots;
  for (const auto& [slot, users] : units) {
    if (users.size() > 1) slots.insert(slot);
  }
  return slots;
}

std::exception_ptr failure_of(const std::function<void()>& attempt) {
  try {
    attempt();
  } catch (...) {
    return std::current_exception();
  }
  return {};
}

// Checks all slots together: memory that is not resident yet would still be available for the next one.
void require_memory_of_host(const std::vector<Slot>& slots, const std::function<bool(const Slot&)>& on_host) {
  std::size_t bytes = 0;
  for (const Slot& slot : slots) {
    if (on_host(slot)) bytes += slot.bytes;
  }
  require_host_memory(bytes, "all that this rank keeps", read_host_limits());
}

}  // namespace

RunningProgram::RunningProgram(const CompiledPlan& plan) : plan_(plan), input_(plan.input()) { count_memory(); }

CompileInput RunningProgram::input_for(const Trace& trace, bool extra_sum_slots) const {
  CompileInput input = input_;
  input.trace = trace;
  input.extra_sum_slots = extra_sum_slots;
  const auto gathered = std::ranges::find(program().slots, SlotRole::gathered, &Slot::role);
  if (gathered != program().slots.end()) input.gathered_bytes = gathered->bytes;
  return input;
}

std::unique_ptr<const Program> RunningProgram::compile_for(const Trace& trace, bool extra_sum_slots) const {
  return std::make_unique<const Program>(compile(input_for(trace, extra_sum_slots)));
}

std::unique_ptr<const Program> RunningProgram::compile_with(std::size_t gathered_bytes) const {
  CompileInput input = input_;
  input.gathered_bytes.reset();
  input.schedule.gathered_bytes = gathered_bytes;
  return std::make_unique<const Program>(compile(input));
}

void RunningProgram::change_to(std::unique_ptr<const Program> program, const Trace& trace, bool extra_sum_slots) {
  compiled_ = std::move(program);
  input_.trace = trace;
  input_.extra_sum_slots = extra_sum_slots;
  count_memory();
}

void RunningProgram::count_memory() { memory_ = bytes_by_tier(ledger_of(program(), plan_.blocks().records())); }

Slots::Slots(const Program& program, MemoryAccounts& accounts, const DeviceMemory& device,
             std::vector<offload::IoQueue*> queues)
    : accounts_(accounts),
      device_(device),
      slots_(program.slots),
      exchanged_(exchanged_slots(program)),
      queues_(std::move(queues)) {
  require_memory_of_host(slots_, [&](const Slot& slot) { return on_host(slot); });
  const std::set<std::size_t> initial_state = slots_of_initial_state(program);
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    const Resident resident = initial_state.contains(slot) ? Resident::when_written : Resident::at_once;
    buffers_.push_back(reserve(slots_[slot], resident, exchanged_.contains(slot)));
  }
  register_with_queues(program);
}

Slots::~Slots() { unregister_from_queues(); }

// Whether it is our own memory on the host.
bool Slots::on_host(const Slot& slot) const {
  return slot.tier != Tier::device || (!device_.gpu && device_.allocator == nullptr);
}

std::size_t Slots::unwritten_bytes(const Piece& piece) const {
  return piece.exists() && on_host(slots_[piece.slot]) && !buffers_[piece.slot].pinned() ? piece.bytes : 0;
}

std::string Slots::unpinned_because() const {
  const auto unpinned = std::ranges::find_if(buffers_, [](const Buffer& buffer) {
    return buffer.kind() == MemoryKind::pinned && buffer.bytes() > 0 && !buffer.pinned();
  });
  return unpinned == buffers_.end() ? "" : fmt::format("{}: {}", unpinned->owner(), unpinned->unpinned_because());
}

Buffer Slots::reserve(const Slot& slot, Resident resident, bool is_exchanged) const {
  const bool on_device = slot.tier == Tier::device;
  BufferRequest request{.bytes = slot.bytes,
                        .owner = slot.name,
                        .gpu = device_.gpu.value_or(0),
                        .resident = resident,
                        .threads = device_.threads};
  if (device_.gpu) request.kind = on_device ? MemoryKind::device : MemoryKind::pinned;
  if (on_device) request.allocator = device_.allocator;
  if (is_exchanged && on_host(slot)) request.allocator = device_.shared;
  return allocate(accounts_, request);
}

void Slots::change_to(const Program& program, const AgreeOnMemory& agree) {
  std::vector<Buffer> buffers;
  std::vector<std::pair<std::size_t, std::size_t>> kept;  // where each comes from, and where it goes
  std::set<std::size_t> exchanged = exchanged_slots(program);
  agree(failure_of([&] {
    for (const Slot& slot : program.slots) {
      const auto same = std::ranges::find(slots_, slot);
      if (same != slots_.end()) kept.emplace_back(same - slots_.begin(), buffers.size());
      const bool is_exchanged = exchanged.contains(buffers.size());
      buffers.push_back(same != slots_.end() ? Buffer() : reserve(slot, Resident::at_once, is_exchanged));
    }
  }));
  unregister_from_queues();
  for (const auto& [from, to] : kept) {
    buffers[to] = std::move(buffers_[from]);
  }
  buffers_ = std::move(buffers);
  slots_ = program.slots;
  exchanged_ = std::move(exchanged);
  register_with_queues(program);
}

void Slots::offload(const Program& program, Staging& staging, bool parameters, const AgreeOnMemory& agree) {
  const std::set<std::size_t> kept = slots_of_initial_state(program);
  const std::set<std::size_t> stay = parameters ? std::set<std::size_t>() : slots_of(program, &Home::parameters);
  std::vector<std::size_t> offloaded;
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    const bool is_kept_here = on_host(slots_[slot]) && kept.contains(slot);
    if (slots_[slot].tier == Tier::device && !is_kept_here && !stay.contains(slot)) offloaded.push_back(slot);
  }
  std::vector<Buffer> left(slots_.size());
  agree(failure_of([&] {
    for (const std::size_t slot : offloaded) {
      if (!kept.contains(slot)) continue;
      left[slot] =
          allocate(accounts_, {.bytes = slots_[slot].bytes, .owner = slots_[slot].name, .threads = device_.threads});
    }
    staging.reserve();
  }));
  for (const std::size_t slot : offloaded) {
    if (left[slot].bytes() > 0) staging.download(left[slot].data(), buffers_[slot].data(), left[slot].bytes());
  }
  staging.finish();
  for (const std::size_t slot : offloaded) {
    buffers_[slot] = std::move(left[slot]);
  }
  offloaded_ = std::move(offloaded);
}

void Slots::reload(Staging& staging, const AgreeOnMemory& agree) {
  std::vector<Buffer> back;
  agree(failure_of([&] {
    for (const std::size_t slot : offloaded_) {
      back.push_back(reserve(slots_[slot], Resident::at_once, exchanged_.contains(slot)));
    }
    staging.reserve();
  }));
  for (std::size_t i = 0; i < offloaded_.size(); ++i) {
    const std::byte* const left = buffers_[offloaded_[i]].data();
    const std::size_t bytes = back[i].bytes();
    if (bytes == 0) continue;
    left != nullptr ? staging.upload(back[i].data(), left, bytes) : staging.zero(back[i].data(), bytes);
  }
  staging.finish();
  for (std::size_t i = 0; i < offloaded_.size(); ++i) {
    buffers_[offloaded_[i]] = std::move(back[i]);
  }
  offloaded_.clear();
}

void Slots::register_with_queues(const Program& program) {
  for (const std::size_t slot : slots_of_records(program)) {
    for (offload::IoQueue* queue : queues_)
      queue->remember({buffers_[slot].data(), buffers_[slot].bytes()});
    registered_.push_back(slot);
  }
}

void Slots::unregister_from_queues() {
  for (const std::size_t slot : registered_) {
    for (offload::IoQueue* queue : queues_)
      queue->forget({buffers_[slot].data(), buffers_[slot].bytes()});
  }
  registered_.clear();
}

View Slots::all_of(SlotRole role) const {
  const auto slot = std::ranges::find(slots_, role, &Slot::role);
  if (slot == slots_.end()) return {};
  return view({static_cast<std::size_t>(slot - slots_.begin()), 0, slot->bytes}, DType::u8);
}

View Slots::view(const Piece& piece, DType dtype) const { return {data(piece), piece.bytes / byte_size(dtype), dtype}; }

ExchangeViews views_of_gather(const CompiledPlan& plan, const Slots& slots, const Op& op) {
  const DType dtype = op.codes.exist() ? plan.model().units[op.unit].dtype : DType::u8;
  return {slots.view(op.from, dtype), slots.view(op.to, dtype)};
}

// A sum is in fp32 between the two reductions of a mesh. The second one completes it and rounds it.
ExchangeViews views_of_reduction(const CompiledPlan& plan, const Slots& slots, const Op& op) {
  const Placement& placement = plan.placement();
  const DType gradient = plan.model().units[op.unit].dtype;
  const DType sum = plan.input().dtype_of_sums(op.unit);
  const bool is_shard_group = op.ranks == Ranks::shard_group;
  const bool is_partial = (is_shard_group ? placement.groups() : placement.ranks_per_group()) > 1;
  return {slots.view(op.from, is_partial && !is_shard_group ? DType::fp32 : gradient),
          slots.view(op.to, is_partial && is_shard_group ? DType::fp32 : sum)};
}

}  // namespace ballast

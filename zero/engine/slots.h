// The program that runs, its memory, and copies of that between host and GPU.
#pragma once

#include <ballast/local_state.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "kernels/runtime/buffer.h"
#include "kernels/runtime/host_limits.h"
#include "kernels/runtime/sizes.h"
#include "offload/io_queue.h"
#include "zero/engine/exec_context.h"
#include "zero/plan/compile.h"
#include "zero/plan/program.h"
#include "zero/plan/program_cost.h"

namespace ballast {

// The program that the engine runs: the plan's, until another order of uses is compiled. Used by the trainer's thread. The
// engine owns it; only OffPlan changes it.
class RunningProgram {
 public:
  // The plan outlives it.
  explicit RunningProgram(const CompiledPlan& plan) : plan_(plan), input_(plan.input()) { count_memory(); }
  RunningProgram(RunningProgram&&) = delete;

  const CompiledPlan& plan() const { return plan_; }
  const CompileInput& input() const { return input_; }
  const Program& program() const { return compiled_ ? *compiled_ : plan_.program(); }
  const TierBytes& memory() const { return memory_; }  // bytes of its slots

  // Compiles for the same memory for gathered units. `extra_sum_slots`: see CompileInput.
  std::unique_ptr<const Program> compile_for(const Trace& trace, bool extra_sum_slots) const {
    return std::make_unique<const Program>(compile(input_for(trace, extra_sum_slots)));
  }

  std::unique_ptr<const Program> compile_with(std::size_t gathered_bytes) const {  // in other memory
    CompileInput input = input_;
    input.gathered_bytes.reset();
    input.schedule.gathered_bytes = gathered_bytes;
    return std::make_unique<const Program>(compile(input));
  }

  // Changes the order of updates, in the same slots: those that can be made again come before the norm, or none.
  void update_early(bool early) {
    input_.schedule.most_repeats = early ? plan_.input().schedule.most_repeats : 0;
    change_to(compile_for(input_.trace, input_.extra_sum_slots), Trace(input_.trace), input_.extra_sum_slots);
  }

  void change_to(std::unique_ptr<const Program> program, const Trace& trace, bool extra_sum_slots) {
    compiled_ = std::move(program);
    input_.trace = trace;
    input_.extra_sum_slots = extra_sum_slots;
    input_.gathered_bytes =
        gathered_bytes();  // this trace might need another size, and off-plan lists use the slot too
    count_memory();
  }

 private:
  CompileInput input_for(const Trace& trace, bool extra_sum_slots) const {
    CompileInput input = input_;
    input.trace = trace;
    input.extra_sum_slots = extra_sum_slots;
    input.gathered_bytes = gathered_bytes();
    return input;
  }

  std::optional<std::size_t> gathered_bytes() const {  // none: the program has no slot for gathered units
    const auto gathered = std::ranges::find(program().slots, SlotRole::gathered, &Slot::role);
    if (gathered == program().slots.end()) return {};
    return gathered->bytes;
  }

  void count_memory() { memory_ = bytes_by_tier(ledger_of(program(), plan_.blocks().records())); }

  const CompiledPlan& plan_;
  CompileInput input_;
  std::unique_ptr<const Program> compiled_{};  // replaces the plan's, if not null
  TierBytes memory_{};
};

// The source of the device tier's memory.
struct DeviceMemory {
  std::optional<int> gpu{};        // none: host memory
  Allocator* allocator = nullptr;  // the caller's, instead of ours; outlives the slots
  Allocator* shared = nullptr;     // allocates slots on the host that other ranks read, unit after unit
  int threads = 1;                 // that make the host's memory resident; 0: one for each usable core
};

// Copies between a GPU and any host memory, through a pair of pinned buffers. The host fills or empties one buffer while the
// other one is on its way. Copies share a buffer, so the host waits once for 16 MiB, however many copies they are. Copies are
// done in order. The buffers live as long as this object, which lives for one call of the engine, and are not in the training's
// accounts. If the driver refuses to pin them, the copies are right, but slow. Without a GPU there are no buffers.
//
// Used by the trainer's thread between steps, when nothing is under way.
class Staging {
 public:
  // `most_bytes` are those of all copies together. `cpu` copies on the host.
  Staging(const ExecContext& device, kernels::Backend& cpu, std::size_t most_bytes)
      : device_(device),
        cpu_(cpu),
        half_bytes_(std::clamp(round_up(most_bytes / 2, alignment), alignment, most_half_bytes)) {}

  Staging(Staging&&) = delete;

  void reserve() {  // throws B2001 if there is too little memory; else the first copy does
    if (device_.stream() == nullptr || buffer_.bytes() > 0) return;
    const int gpu = device_.stream()->gpu();
    buffer_ =
        allocate(accounts_, {.kind = MemoryKind::pinned, .bytes = 2 * half_bytes_, .owner = "staging", .gpu = gpu});
    for (std::size_t i = 0; i < halves_.size(); ++i) {
      halves_[i].memory = buffer_.data() + i * half_bytes_;
      halves_[i].copied.emplace(gpu);
    }
  }

  // Writes the bytes from the given one on, which are not clear.
  using Writer = std::function<void(std::size_t first, std::span<std::byte> bytes)>;

  void upload(std::byte* to, const std::byte* from, std::size_t bytes) {  // `from` may be changed when this returns
    if (device_.stream() == nullptr) return device_.copy(to, from, bytes);
    upload({to, bytes},
           [&](std::size_t first, std::span<std::byte> part) { copy_on_host(part.data(), from + first, part.size()); });
  }

  // Calls `writer` once or more, in order.
  void upload(std::span<std::byte> to, const Writer& writer) {
    if (device_.stream() == nullptr && !to.empty()) return writer(0, to);
    for (std::size_t first = 0; first < to.size();) {
      const std::span<std::byte> part = room_for(to.size() - first);
      writer(first, part);
      device_.copy(to.data() + first, part.data(), part.size());
      first += part.size();
    }
  }

  // `to` is written when finish() returns.
  void download(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (device_.stream() == nullptr) return device_.copy(to, from, bytes);
    for (std::size_t first = 0; first < bytes;) {
      const std::span<std::byte> part = room_for(bytes - first);
      device_.copy(part.data(), from + first, part.size());
      halves_[current_].arrivals.push_back({.to = to + first, .from = part.data(), .bytes = part.size()});
      first += part.size();
    }
  }

  void zero(std::byte* memory, std::size_t bytes) { device_.zero(memory, bytes); }

  void finish() {  // waits for all copies
    if (buffer_.bytes() == 0) return device_.finish();
    turn();
    turn();
  }

 private:
  struct Arrival {
    std::byte* to;
    const std::byte* from;  // a place in the buffer
    std::size_t bytes;
  };
  struct Half {
    std::byte* memory = nullptr;
    std::size_t used = 0;
    std::optional<Event> copied{};  // recorded after its last copy
    std::vector<Arrival> arrivals{};
  };

  // Returns memory of the current half, or of the other one if it is full.
  std::span<std::byte> room_for(std::size_t most) {
    reserve();
    if (halves_[current_].used == half_bytes_) turn();
    Half& half = halves_[current_];
    const std::span<std::byte> room(half.memory + half.used, std::min(most, half_bytes_ - half.used));
    half.used += round_up(room.size(), alignment);
    return room;
  }

  void turn() {
    halves_[current_].copied->record(*device_.stream());
    current_ = 1 - current_;
    settle(halves_[current_]);
  }

  // Waits for the copies of a half, and brings what has arrived in it to its place.
  void settle(Half& half) {
    half.copied->synchronize();
    for (const Arrival& arrival : half.arrivals) {
      copy_on_host(arrival.to, arrival.from, arrival.bytes);
    }
    half.arrivals.clear();
    half.used = 0;
  }

  void copy_on_host(std::byte* to, const std::byte* from, std::size_t bytes) {
    cpu_.cast(ConstView(from, bytes, DType::u8), View(to, bytes, DType::u8));
  }

  static constexpr std::size_t most_half_bytes = std::size_t{16}
                                                 << 20;  // the bus is at its speed; pinned in milliseconds
  static constexpr std::size_t alignment = 64;           // alignment of each copy: whole elements of all formats

  ExecContext device_;
  kernels::Backend& cpu_;
  std::size_t half_bytes_;
  MemoryAccounts accounts_{};
  Buffer buffer_{};
  std::array<Half, 2> halves_{};
  std::size_t current_ = 0;  // half
};

// Every slot is reserved at once, so that nothing grows later. Memory for the initial state becomes resident when it is
// written, so that the caller can free its own copy of parameters meanwhile; on a GPU, reserve_late() reserves it then.
//
// Used by the trainer's thread; view(), data(), bytes() and on_gpu() by the lanes' too.
class Slots {
 public:
  // Records pass through host slots, which are registered with the drives' queues. With a GPU the host's memory is
  // pinned.
  Slots(const Program& program, MemoryAccounts& accounts, const DeviceMemory& device,
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
      Slot now = slots_[slot];
      if (resident == Resident::when_written && now.tier == Tier::device && device_.gpu) now.bytes = 0;
      buffers_.push_back(reserve(now, resident, exchanged_.contains(slot)));
    }
    register_with_queues(program);
  }

  Slots(Slots&&) = delete;
  ~Slots() { unregister_from_queues(); }

  // Returns the memory of the piece's slot if it has been reserved now, and nothing if it was reserved before.
  std::span<std::byte> reserve_late(const Piece& piece) {
    if (!piece.exists() || buffers_[piece.slot].bytes() == slots_[piece.slot].bytes) return {};
    buffers_[piece.slot] = reserve(slots_[piece.slot], Resident::when_written, exchanged_.contains(piece.slot));
    return {buffers_[piece.slot].data(), buffers_[piece.slot].bytes()};
  }

  std::size_t unreserved_bytes() const {
    std::size_t bytes = 0;
    for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
      bytes += slots_[slot].bytes - buffers_[slot].bytes();
    }
    return bytes;
  }

  // Only while nothing uses the slots. Those of the same name and size keep their memory and its contents; others are
  // freed or reserved. `agree` is called as in reload(). If it throws, nothing has changed.
  void change_to(const Program& program, const AgreeOnMemory& agree = throw_own) {
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

  // Only while nothing uses the slots: frees the device tier's memory, except that of parameters, if those stay. State
  // and parameters are copied to the host and back; everything else returns zeroed. `agree` is called once the new
  // memory is reserved, or with the error if it cannot be; nothing has changed if it throws.
  void offload(const Program& program, Staging& staging, bool parameters, const AgreeOnMemory& agree) {
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

  void reload(Staging& staging, const AgreeOnMemory& agree) {
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

  // Bytes of host memory that become resident when the initial state is written there; none of pinned memory.
  std::size_t unwritten_bytes(const Piece& piece) const {
    return piece.exists() && on_host(slots_[piece.slot]) && !buffers_[piece.slot].pinned() ? piece.bytes : 0;
  }

  // The reason, if a GPU copies from pageable memory; empty if all host memory is pinned.
  std::string unpinned_because() const {
    const auto unpinned = std::ranges::find_if(buffers_, [](const Buffer& buffer) {
      return buffer.kind() == MemoryKind::pinned && buffer.bytes() > 0 && !buffer.pinned();
    });
    return unpinned == buffers_.end() ? "" : fmt::format("{}: {}", unpinned->owner(), unpinned->unpinned_because());
  }

  View view(const Piece& piece, DType dtype) const { return {data(piece), piece.bytes / byte_size(dtype), dtype}; }

  std::byte* data(const Piece& piece) const {  // null without memory, as for the state of a rule that keeps none
    return piece.exists() ? buffers_[piece.slot].data() + piece.begin : nullptr;
  }

  View all_of(SlotRole role) const {  // bytes of the only slot that has it; none if there is none
    const auto slot = std::ranges::find(slots_, role, &Slot::role);
    if (slot == slots_.end()) return {};
    return view({static_cast<std::size_t>(slot - slots_.begin()), 0, slot->bytes}, DType::u8);
  }

  std::span<std::byte> bytes(const Piece& piece) const { return {data(piece), piece.bytes}; }
  bool on_gpu(const Piece& piece) const { return piece.exists() && buffers_[piece.slot].kind() == MemoryKind::device; }

 private:
  // Checks all slots together: memory that is not resident yet would still be available for the next one.
  static void require_memory_of_host(const std::vector<Slot>& slots, const std::function<bool(const Slot&)>& on_host) {
    std::size_t bytes = 0;
    for (const Slot& slot : slots) {
      if (on_host(slot)) bytes += slot.bytes;
    }
    require_host_memory(bytes, "all that this rank keeps", read_host_limits());
  }

  static std::exception_ptr failure_of(const std::function<void()>& attempt) {
    try {
      attempt();
    } catch (...) {
      return std::current_exception();
    }
    return {};
  }

  // Slots that other ranks read. On CPUs a slot of one unit is left out: it may be as large as the model, and every page that
  // another rank reads counts as memory of that rank, too.
  static std::set<std::size_t> exchanged_slots(const Program& program) {
    std::map<std::size_t, std::set<std::size_t>> units;  // the key is the slot
    std::set<std::size_t> in_place;
    for (const Op& op : program.ops) {
      if (op.codes.exist()) {  // other ranks read codes in place of values
        units[op.codes.memory.slot].insert(op.unit);
        continue;
      }
      if (passes_host(op)) {
        in_place.insert(op.from.slot);
        continue;
      }
      if (op.kind == OpKind::gather) units[op.to.slot].insert(op.unit);
      if (op.kind != OpKind::reduce) continue;
      units[op.from.slot].insert(op.unit);
      if (op.ranks == Ranks::replica_group) units[op.to.slot].insert(op.unit);  // it gathers parts of the sum
    }
    std::set<std::size_t> slots = std::move(in_place);
    for (const auto& [slot, users] : units) {
      if (users.size() > 1) slots.insert(slot);
    }
    return slots;
  }

  static std::set<std::size_t> slots_of_initial_state(const Program& program) {
    std::set<std::size_t> slots = slots_of(program, &Home::parameters);
    slots.merge(slots_of(program, &Home::state));
    return slots;
  }

  static std::set<std::size_t> slots_of(const Program& program, Piece Home::*what) {
    std::set<std::size_t> slots;
    for (const Home& home : program.homes) {
      if ((home.*what).exists()) slots.insert((home.*what).slot);
    }
    return slots;
  }

  static std::set<std::size_t> slots_of_records(const Program& program) {
    std::set<std::size_t> slots;
    for (const std::vector<Op>* ops : {&program.entry, &program.ops}) {
      for (const Op& op : *ops) {
        if (op.kind == OpKind::read || op.kind == OpKind::read_first) slots.insert(op.to.slot);
      }
    }
    return slots;
  }

  Buffer reserve(const Slot& slot, Resident resident, bool is_exchanged) const {
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

  // Whether it is our own memory on the host.
  bool on_host(const Slot& slot) const {
    return slot.tier != Tier::device || (!device_.gpu && device_.allocator == nullptr);
  }

  void register_with_queues(const Program& program) {
    for (const std::size_t slot : slots_of_records(program)) {
      for (offload::IoQueue* queue : queues_)
        queue->remember({buffers_[slot].data(), buffers_[slot].bytes()});
      registered_.push_back(slot);
    }
  }

  void unregister_from_queues() {
    for (const std::size_t slot : registered_) {
      for (offload::IoQueue* queue : queues_)
        queue->forget({buffers_[slot].data(), buffers_[slot].bytes()});
    }
    registered_.clear();
  }

  MemoryAccounts& accounts_;
  DeviceMemory device_;
  std::vector<Slot> slots_;
  std::vector<Buffer> buffers_;
  std::set<std::size_t> exchanged_;  // slots
  std::vector<offload::IoQueue*> queues_;
  std::vector<std::size_t> registered_;  // slots, with the queues
  std::vector<std::size_t> offloaded_;   // slots that have left the device
};

// The memory of an exchange between ranks, with the number formats of its values.
struct ExchangeViews {
  View from{};
  View to{};
};

inline ExchangeViews views_of_gather(const CompiledPlan& plan, const Slots& slots, const Op& op) {
  const DType dtype = op.codes.exist() ? plan.model().units[op.unit].dtype : DType::u8;
  return {slots.view(op.from, dtype), slots.view(op.to, dtype)};
}
// A sum is in fp32 between the two reductions of a mesh. The second one completes it and rounds it.
inline ExchangeViews views_of_reduction(const CompiledPlan& plan, const Slots& slots, const Op& op) {
  const Placement& placement = plan.placement();
  const DType gradient = plan.model().units[op.unit].dtype;
  const DType sum = plan.input().dtype_of_sums(op.unit);
  const bool is_shard_group = op.ranks == Ranks::shard_group;
  const bool is_partial = (is_shard_group ? placement.groups() : placement.ranks_per_group()) > 1;
  return {slots.view(op.from, is_partial && !is_shard_group ? DType::fp32 : gradient),
          slots.view(op.to, is_partial && is_shard_group ? DType::fp32 : sum)};
}

}  // namespace ballast

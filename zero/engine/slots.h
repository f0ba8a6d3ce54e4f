// The program that runs, and its memory.
#pragma once

#include <ballast/local_state.h>

#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "kernels/runtime/buffer.h"
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
  explicit RunningProgram(const CompiledPlan& plan);  // the plan outlives it
  RunningProgram(RunningProgram&&) = delete;

  const CompiledPlan& plan() const { return plan_; }
  const CompileInput& input() const { return input_; }
  const Program& program() const { return compiled_ ? *compiled_ : plan_.program(); }
  const TierBytes& memory() const { return memory_; }  // bytes of its slots

  // Compiles for the same memory for gathered units. `extra_sum_slots`: see CompileInput.
  std::unique_ptr<const Program> compile_for(const Trace& trace, bool extra_sum_slots) const;
  std::unique_ptr<const Program> compile_with(std::size_t gathered_bytes) const;  // in other memory
  void change_to(std::unique_ptr<const Program> program, const Trace& trace, bool extra_sum_slots);

 private:
  CompileInput input_for(const Trace& trace, bool extra_sum_slots) const;
  void count_memory();

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

class Staging;

// Every slot is reserved at once, so that nothing grows later. Memory for the initial state becomes resident when it is
// written, so that the caller can free its own copy meanwhile.
//
// Used by the trainer's thread; view(), data(), bytes() and on_gpu() by the lanes' too.
class Slots {
 public:
  // Records pass through host slots, which are registered with the drives' queues. With a GPU the host's memory is
  // pinned.
  Slots(const Program& program, MemoryAccounts& accounts, const DeviceMemory& device,
        std::vector<offload::IoQueue*> queues);
  Slots(Slots&&) = delete;
  ~Slots();

  // Only while nothing uses the slots. Those of the same name and size keep their memory and its contents; others are
  // freed or reserved. `agree` is called as in reload(). If it throws, nothing has changed.
  void change_to(const Program& program, const AgreeOnMemory& agree = throw_own);

  // Only while nothing uses the slots: frees the device tier's memory, except that of parameters, if those stay. State
  // and parameters are copied to the host and back; everything else returns zeroed. `agree` is called once the new
  // memory is reserved, or with the error if it cannot be; nothing has changed if it throws.
  void offload(const Program& program, Staging& staging, bool parameters, const AgreeOnMemory& agree);
  void reload(Staging& staging, const AgreeOnMemory& agree);

  // Bytes of host memory that become resident when the initial state is written there; none of pinned memory.
  std::size_t unwritten_bytes(const Piece& piece) const;

  // The reason, if a GPU copies from pageable memory; empty if all host memory is pinned.
  std::string unpinned_because() const;

  View view(const Piece& piece, DType dtype) const;
  std::byte* data(const Piece& piece) const {  // null without memory, as for the state of a rule that keeps none
    return piece.exists() ? buffers_[piece.slot].data() + piece.begin : nullptr;
  }
  View all_of(SlotRole role) const;  // bytes of the only slot that has it; none if there is none
  std::span<std::byte> bytes(const Piece& piece) const { return {data(piece), piece.bytes}; }
  bool on_gpu(const Piece& piece) const { return piece.exists() && buffers_[piece.slot].kind() == MemoryKind::device; }

 private:
  Buffer reserve(const Slot& slot, Resident resident, bool is_exchanged) const;
  bool on_host(const Slot& slot) const;
  void register_with_queues(const Program& program);
  void unregister_from_queues();

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

ExchangeViews views_of_gather(const CompiledPlan& plan, const Slots& slots, const Op& op);
ExchangeViews views_of_reduction(const CompiledPlan& plan, const Slots& slots, const Op& op);

}  // namespace ballast

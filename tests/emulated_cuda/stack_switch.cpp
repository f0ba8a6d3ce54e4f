#include "tests/emulated_cuda/stack_switch.h"

#include <cstdint>

#ifdef __x86_64__

// Keeps what a called function has to keep, and the place to return to, on the stack that is left.
extern "C" void emulated_switch_stack(void** left, void* entered);
asm(R"(
.text
.globl emulated_switch_stack
.type emulated_switch_stack, @function
emulated_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulated_switch_stack, . - emulated_switch_stack
)");

namespace emulated {

Stack::Stack(std::byte* memory, std::size_t bytes, void (*begin)()) {
  constexpr std::size_t registers = 6;
  const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(memory + bytes) / 16 * 16;
  auto* const place = reinterpret_cast<std::uint64_t*>(end - 16);  // aligned as at a call
  *place = reinterpret_cast<std::uint64_t>(begin);
  for (std::size_t i = 1; i <= registers; ++i) {
    place[-static_cast<std::ptrdiff_t>(i)] = 0;
  }
  top_ = place - registers;
}

void Stack::switch_to(const Stack& other) { emulated_switch_stack(&top_, other.top_); }

}  // namespace emulated

#else

namespace emulated {

Stack::Stack(std::byte* memory, std::size_t bytes, void (*begin)()) {
  ::getcontext(&context_);
  context_.uc_stack.ss_sp = memory;
  context_.uc_stack.ss_size = bytes;
  ::makecontext(&context_, begin, 0);
}

void Stack::switch_to(const Stack& other) { ::swapcontext(&context_, &other.context_); }

}  // namespace emulated

#endif

// Leaves one stack for another. On x86-64 in a few instructions, because a block of 256 threads switches thousands of times;
// elsewhere through ucontext, which makes two system calls.
#pragma once

#include <ucontext.h>

#include <cstddef>

namespace emulated {

class Stack {
 public:
  Stack() = default;                                             // the one that the thread runs on
  Stack(std::byte* memory, std::size_t bytes, void (*begin)());  // `begin` never returns
  void switch_to(const Stack& other);                            // returns when something switches back

 private:
#ifdef __x86_64__
  void* top_ = nullptr;
#else
  ucontext_t context_{};
#endif
};

}  // namespace emulated

// A stack of its own for each thread of a block, with the notes that sanitizers need of each switch.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "tests/emulated_cuda/stack_switch.h"

namespace emulated {

class Fiber {
 public:
  Fiber();                                     // the thread of the host that makes it
  explicit Fiber(std::function<void()> body);  // the body never returns
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void switch_to(Fiber& other);  // called by the running fiber; returns when another one switches to this one
  void is_this_thread();         // makes a fiber of the host stand for the thread that calls

 private:
  static void begin();
  void has_been_entered();

  std::function<void()> body_{};
  std::unique_ptr<std::byte[]> memory_{};
  Stack stack_{};
  [[maybe_unused]] void* sanitizer_fiber_ = nullptr;
  [[maybe_unused]] void* fake_stack_ = nullptr;
  const void* bottom_ = nullptr;
  [[maybe_unused]] std::size_t bytes_ = 0;
};

}  // namespace emulated

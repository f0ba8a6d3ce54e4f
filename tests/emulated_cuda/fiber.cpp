#include "tests/emulated_cuda/fiber.h"

#if defined(__SANITIZE_ADDRESS__)  // GCC
#define BALLAST_ADDRESS_SANITIZER
#elif defined(__SANITIZE_THREAD__)
#define BALLAST_THREAD_SANITIZER
#elif defined(__has_feature)  // Clang
#if __has_feature(address_sanitizer)
#define BALLAST_ADDRESS_SANITIZER
#elif __has_feature(thread_sanitizer)
#define BALLAST_THREAD_SANITIZER
#endif
#endif

#ifdef BALLAST_ADDRESS_SANITIZER
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef BALLAST_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#endif

namespace emulated {
namespace {

constexpr std::size_t stack_bytes = 256 * 1024;

// The fiber that ran last. The variable is not thread-local, because a fiber may resume on another thread and compilers
// keep the address of a thread-local variable. One block runs at a time.
Fiber* left = nullptr;
Fiber* entered = nullptr;

}  // namespace

Fiber::Fiber() { is_this_thread(); }

Fiber::Fiber(std::function<void()> body)
    : body_(std::move(body)),
      memory_(new std::byte[stack_bytes]),
      stack_(memory_.get(), stack_bytes, &Fiber::begin),
      bottom_(memory_.get()),
      bytes_(stack_bytes) {
#ifdef BALLAST_THREAD_SANITIZER
  sanitizer_fiber_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#ifdef BALLAST_THREAD_SANITIZER
  if (memory_ != nullptr) __tsan_destroy_fiber(sanitizer_fiber_);
#endif
}

void Fiber::is_this_thread() {
#ifdef BALLAST_THREAD_SANITIZER
  sanitizer_fiber_ = __tsan_get_current_fiber();
#endif
}

void Fiber::switch_to(Fiber& other) {
  left = this;
  entered = &other;
#ifdef BALLAST_ADDRESS_SANITIZER
  __sanitizer_start_switch_fiber(&fake_stack_, other.bottom_, other.bytes_);
#endif
#ifdef BALLAST_THREAD_SANITIZER
  __tsan_switch_to_fiber(other.sanitizer_fiber_, 0);
#endif
  stack_.switch_to(other.stack_);
  has_been_entered();
}

// The stack of a thread of the host is learned when it is left for the first time.
void Fiber::has_been_entered() {
#ifdef BALLAST_ADDRESS_SANITIZER
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &bytes);
  if (left->memory_ == nullptr) {
    left->bottom_ = bottom;
    left->bytes_ = bytes;
  }
#endif
}

void Fiber::begin() {
  entered->has_been_entered();
  entered->body_();
}

}  // namespace emulated

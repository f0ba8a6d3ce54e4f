#include "tests/emulated_cuda/block.h"

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "tests/emulated_cuda/fiber.h"
#include "tests/emulated_cuda/rules.h"

constinit thread_local uint3 threadIdx{};

namespace emulated {
namespace {

constexpr unsigned warp_size = 32;
using Words = std::array<std::uint64_t, warp_size>;

// A point that threads reach together, again and again. Values of the last time are still there while the threads
// read them, because none of them can be two times ahead.
struct Meeting {
  unsigned arrived = 0;
  std::size_t times = 0;
  std::array<Words, 2> values{};
  std::vector<Fiber*> waiting{};
};

// This is not inline: a fiber may continue in another thread, and compilers keep the address of a thread's variable.
[[gnu::noinline]] void set_thread_index(unsigned index) { threadIdx = {index, 0, 0}; }

// The block that runs now. One runs at a time in the whole process, so that all blocks use the same fibers.
class Block {
 public:
  void run(unsigned threads, const Thread& thread) {
    const std::lock_guard lock(mutex_);
    host_.is_this_thread();
    thread_ = &thread;
    threads_ = threads;
    unfinished_ = threads;
    not_begun_.resize(threads);
    std::iota(not_begun_.begin(), not_begun_.end(), 0u);
    std::ranges::shuffle(not_begun_, random_);
    barrier_ = {};
    warps_.clear();
    running_ = &host_;
    switch_to(next());
  }

  void wait_for_block() { meet(barrier_, threads_); }

  std::uint64_t exchange(unsigned mask, std::uint64_t mine, unsigned source_lane) {
    if ((mask >> source_lane & 1) == 0) broken("a shuffle reads a thread of its mask", "the source's bit is not set");
    return gather(mask, mine)[source_lane];
  }

  // The words of all threads of the mask. They stay until each of these threads has called again.
  const Words& gather(unsigned mask, std::uint64_t mine) {
    const unsigned lane = threadIdx.x % warp_size;
    if ((mask >> lane & 1) == 0) broken("a thread names itself in a warp's mask", "its bit is not set");
    Meeting& meeting = warps_[{threadIdx.x / warp_size, mask}];
    auto& values = meeting.values[meeting.times % 2];
    values[lane] = mine;
    meet(meeting, static_cast<unsigned>(std::popcount(mask)));
    return values;
  }

 private:
  void meet(Meeting& meeting, unsigned members) {
    if (++meeting.arrived < members) {
      meeting.waiting.push_back(running_);
      const unsigned index = threadIdx.x;
      switch_to(next());
      set_thread_index(index);
      return;
    }
    meeting.arrived = 0;
    ++meeting.times;
    can_run_.insert(can_run_.end(), meeting.waiting.begin(), meeting.waiting.end());
    meeting.waiting.clear();
  }

  // Chooses what runs next: a fiber whose wait has ended, or one for a thread that has not begun.
  Fiber& next() {
    const std::size_t choices = can_run_.size() + not_begun_.size();
    if (choices == 0) broken("the threads of a block meet", "some wait for threads that have ended or wait elsewhere");
    const std::size_t chosen = random_() % choices;
    if (chosen >= can_run_.size()) return idle_fiber();
    std::swap(can_run_[chosen], can_run_.back());
    Fiber& fiber = *can_run_.back();
    can_run_.pop_back();
    return fiber;
  }

  Fiber& idle_fiber() {
    if (idle_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>([this] { run_threads(); }));
      return *fibers_.back();
    }
    Fiber& fiber = *idle_.back();
    idle_.pop_back();
    return fiber;
  }

  void switch_to(Fiber& other) {
    Fiber& from = *std::exchange(running_, &other);
    from.switch_to(other);
  }

  // The body of every fiber. A thread that ends without having waited leaves its fiber to the next one.
  void run_threads() {
    while (true) {
      set_thread_index(not_begun_.back());
      not_begun_.pop_back();
      (*thread_)();
      --unfinished_;
      Fiber& self = *running_;
      idle_.push_back(&self);
      Fiber& other = unfinished_ == 0 ? host_ : next();
      if (&other != &self) switch_to(other);
    }
  }

  std::mutex mutex_;
  Fiber host_{};
  Fiber* running_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  std::vector<Fiber*> can_run_;
  const Thread* thread_ = nullptr;
  unsigned threads_ = 0;
  unsigned unfinished_ = 0;
  std::vector<unsigned> not_begun_;
  Meeting barrier_;
  std::map<std::pair<unsigned, unsigned>, Meeting> warps_;
  std::minstd_rand random_{7};
};

Block& block() {
  static Block only;
  return only;
}

}  // namespace

void run_block(unsigned threads, const Thread& thread) { block().run(threads, thread); }

std::uint64_t exchange_in_warp(unsigned mask, std::uint64_t mine, unsigned source_lane) {
  return block().exchange(mask, mine, source_lane);
}

unsigned lane_of_this_thread() { return threadIdx.x % warp_size; }

void multiply_tensors(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  const auto pair = [](std::uint32_t low, std::uint32_t high) { return std::uint64_t{high} << 32 | low; };
  const std::array<Words, 3> all{block().gather(~0u, pair(a[0], a[1])), block().gather(~0u, pair(a[2], a[3])),
                                 block().gather(~0u, pair(b0, b1))};
  const auto number = [](std::uint64_t word, unsigned place) {  // of four in bf16
    return std::bit_cast<float>(static_cast<std::uint32_t>(word >> 16 * place << 16));
  };
  const unsigned lane = lane_of_this_thread();
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned held_by = k % 8 / 2;
      sums[i] += number(all[k / 8][row % 8 * 4 + held_by], row / 8 * 2 + k % 2) *
                 number(all[2][column * 4 + held_by], k / 8 * 2 + k % 2);
    }
  }
}

void load_matrices(std::uint32_t (&to)[4], const void* row, bool transposed) {
  if (reinterpret_cast<std::uintptr_t>(row) % 16 != 0) broken("rows of matrices are aligned", "to 16 bytes");
  const Words rows = block().gather(~0u, reinterpret_cast<std::uintptr_t>(row));
  const unsigned lane = lane_of_this_thread();
  for (unsigned i = 0; i < 8; ++i) {
    const unsigned down = transposed ? lane % 4 * 2 + i % 2 : lane / 4,
                   across = transposed ? lane / 4 : lane % 4 * 2 + i % 2;
    std::uint16_t half = 0;
    std::memcpy(&half, reinterpret_cast<const std::uint16_t*>(rows[i / 2 * 8 + down]) + across, sizeof half);
    to[i / 2] = i % 2 == 0 ? half : to[i / 2] | std::uint32_t{half} << 16;
  }
}

}  // namespace emulated

void __syncthreads() { emulated::block().wait_for_block(); }
void __syncwarp(unsigned mask) { emulated::exchange_in_warp(mask, 0, emulated::lane_of_this_thread()); }

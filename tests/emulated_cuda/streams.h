// Emulated streams: a thread for each, which is late on purpose.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <random>
#include <thread>

#include "tests/emulated_cuda/nccl_order.h"

namespace emulated {

using Work = std::function<void()>;

// A thread that does work in order, and ends after the work that it has when it is told to.
class Queue {
 public:
  Queue();
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  void add(Work work);
  bool is_idle();
  void wait();  // returns when the work that was added so far has ended
  void end();   // adds nothing more; returns at once

 private:
  void run();
  void be_late();

  std::mutex mutex_;  // guards the members below, except for the thread and what it uses alone
  std::condition_variable has_work_;
  std::condition_variable is_done_;
  std::deque<Work> work_;
  std::uint64_t added_ = 0;
  std::uint64_t done_ = 0;
  std::uint64_t waited_for_ = 0;  // the first work, by its number, that a thread may wait for; no other end wakes one
  bool ending_ = false;
  std::minstd_rand random_;
  std::thread thread_;
};

}  // namespace emulated

struct CUstream_st {
  explicit CUstream_st(int on_gpu) : gpu(on_gpu) {}

  int gpu;
  std::mutex mutex{};  // guards the clock
  emulated::NcclClock clock{};
  emulated::Queue queue{};
};

namespace emulated {

CUstream_st& stream_of(cudaStream_t handle);  // null: of the current GPU
void wait_for_all_streams_of(int gpu);
void is_known_to_host(const NcclClock& clock);  // a thread of the host has waited for work
NcclClock known_to_host();
std::size_t live_streams();

}  // namespace emulated

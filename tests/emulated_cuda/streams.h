// Emulated streams: a thread for each, which is late on purpose, or does nothing until somebody waits for it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "tests/emulated_cuda/include/cuda_runtime_api.h"
#include "tests/emulated_cuda/memory_order.h"

namespace emulated {

using Work = std::function<void()>;

// A thread that does work in order, and ends after the work that it has when it is told to.
class Queue {
 public:
  Queue();
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  std::uint64_t add(Work work);     // returns its number, from 1
  void want(std::uint64_t number);  // somebody waits for this work: a lazy stream may do it, and what comes before
  bool is_idle();                   // somebody who asks wants all of it
  void wait();                      // returns when the work that was added so far has ended
  void end();                       // adds nothing more; returns at once

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
  std::uint64_t wanted_ = 0;      // the last work, by its number, that a lazy stream may do
  bool ending_ = false;
  std::minstd_rand random_;
  std::thread thread_;
};

}  // namespace emulated

struct CUstream_st {
  explicit CUstream_st(int on_gpu);
  ~CUstream_st();
  CUstream_st(const CUstream_st&) = delete;
  CUstream_st& operator=(const CUstream_st&) = delete;

  // Adds work of a call, and what it accesses. What a kernel accesses besides is found while it runs.
  emulated::IssuedPtr issue(const char* call, std::vector<emulated::Access> accesses, emulated::Work work);
  // Adds a mark, or a wait, that accesses nothing. Returns its number in the queue.
  std::uint64_t add(emulated::Work work) { return queue->add(std::move(work)); }

  void follow(const emulated::Clock& others);  // what is added from now on comes after that work
  emulated::Clock clock();                     // what has ended when all that was added has
  void wait();                                 // the host waits for all that was added, and knows that it has ended

  const int gpu;
  const std::shared_ptr<emulated::Queue> queue = std::make_shared<emulated::Queue>();

 private:
  const std::size_t index_;
  std::mutex mutex_;  // guards the members below, and makes the order of numbers that of the queue
  std::uint64_t issued_ = 0;
  emulated::Clock clock_{};
};

namespace emulated {

CUstream_st& stream_of(cudaStream_t handle);  // null: of the current GPU
void wait_for_all_streams_of(int gpu);
std::size_t live_streams();
bool is_forgotten_wait();  // counts the waits of streams

// All threads of the host count as one: what one has waited for, the others know.
void is_known_to_host(const Clock& ended);
Clock known_to_host();

}  // namespace emulated

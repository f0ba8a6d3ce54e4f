// System calls that fail on command, for a queue of threads, and a drive that loses unflushed writes.
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#include "offload/io_queue.h"

namespace ballast::offload {

// A fault of one call.
struct Fault {
  enum class What { error, short_transfer, flipped_bit, delay, torn_write } what = What::error;
  int error = 0;             // an errno, for `error`
  std::uint64_t amount = 0;  // bytes of a short transfer or a torn write, bit to flip, milliseconds of delay
};

// Any thread may call.
class FaultyCalls {
 public:
  // The next calls of this kind get these faults, in order.
  void plan(IoKind kind, std::deque<Fault> faults);
  void plan_error(IoKind kind, int error, std::size_t times = 1);

  // A random part of all calls is interrupted, refused, cut short or delayed from now on. A queue has to hide these
  // faults.
  void disturb(unsigned seed);

  std::int64_t operator()(const IoRequest& request);

  std::size_t calls(IoKind kind) const;
  std::size_t left(IoKind kind) const;  // faults that were planned and have not happened

 private:
  bool next_fault(IoKind kind, Fault& fault);

  mutable std::mutex mutex_;
  std::map<IoKind, std::deque<Fault>> planned_;
  std::map<IoKind, std::size_t> calls_;
  std::mt19937 random_;
  bool disturbing_ = false;
};

// A kernel that refuses to be entered, for a queue with a ring. Any thread may call.
class FaultyRing {
 public:
  enum class Which { all, submissions, waits };
  static constexpr std::size_t always = SIZE_MAX;
  static constexpr std::size_t given_up_after = 5;

  // The next `times` calls of this kind fail with the error.
  void refuse(int error, std::size_t times = always, Which which = Which::all);

  // The next submission is accepted, and never answered.
  void lose_next_submission();

  RingEntry entry();  // the entry for a queue that this object outlives

 private:
  int enter(std::size_t requests, const std::function<int()>& call);

  std::mutex mutex_;
  int error_ = 0;
  std::size_t times_ = 0;
  Which which_ = Which::all;
  bool loses_ = false;
};

// Keeps the bytes that writes since the last flush of their file have overwritten. When the power goes, it puts them
// back: all blocks, or a random choice. Any thread may call. Nothing is in flight when the power goes.
class ForgetfulDrive {
 public:
  std::int64_t operator()(const IoRequest& request);

  // The power is gone after `calls` more calls, and every later call fails.
  void die_after(std::size_t calls);

  // Decides what the drive holds when it comes back: it forgets all unflushed blocks or a random choice of them.
  enum class Forgets { everything, at_random };
  void lose_power(Forgets forgets, unsigned seed = 0);

 private:
  struct Overwritten {
    const File* file;
    std::uint64_t offset;
    std::vector<std::byte> bytes;
  };
  std::mutex mutex_;
  std::vector<Overwritten> unflushed_;
  std::size_t calls_left_ = SIZE_MAX;
};

}  // namespace ballast::offload

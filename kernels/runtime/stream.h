// Streams and events: owners of the GPU's queues, and of marks in them. No function waits unless its name says so.
#pragma once

#include <cstddef>
#include <memory>

#include "kernels/runtime/device.h"

struct CUevent_st;  // the target of CUDA's handle

namespace ballast {

using EventHandle = CUevent_st*;

class Event;

// An ordered queue of GPU work. Any thread may issue work; the work of two threads is not ordered. Issued work also
// completes after the stream is destroyed.
class Stream {
 public:
  enum class Priority { normal, high };  // the kernels of a high one begin before those that wait in others

  explicit Stream(int gpu = 0, Priority priority = Priority::normal);  // throws B2101 or B2102 without a GPU
  static Stream wrap(StreamHandle handle, int gpu = 0) {               // a stream that the caller owns
    device::require_gpu(gpu);
    return Stream(handle, Destroy{.owned = false}, gpu);
  }

  StreamHandle handle() const { return handle_.get(); }
  int gpu() const { return gpu_; }

  void wait_for(const Event& event) const;  // later work in this stream starts after the event; returns at once
  void synchronize() const;                 // the calling thread waits

 private:
  struct Destroy {
    bool owned = true;
    void operator()(StreamHandle stream) const noexcept;
  };
  Stream(StreamHandle handle, Destroy destroy, int gpu) : handle_(handle, destroy), gpu_(gpu) {}

  std::unique_ptr<CUstream_st, Destroy> handle_;
  int gpu_;
};

// A mark in a stream. Any thread may query or wait; one thread at a time records. An event that was never recorded is
// done.
class Event {
 public:
  enum class Timing { off, on };

  explicit Event(int gpu = 0, Timing timing = Timing::off);

  EventHandle handle() const { return handle_.get(); }

  void record(const Stream& stream) const;  // marks the end of all work issued into the stream so far
  bool is_done() const;
  void synchronize() const;                        // the calling thread sleeps until it is done
  double seconds_since(const Event& start) const;  // both with Timing::on, and both done

 private:
  struct Destroy {
    void operator()(EventHandle event) const noexcept;
  };
  std::unique_ptr<CUevent_st, Destroy> handle_;
};

// Issues a copy into the stream, in any direction between device and host. Both ends must live until it is done. With
// host memory that is not pinned, the call waits.
void copy(void* to, const void* from, std::size_t bytes, const Stream& stream);
void fill(void* to, unsigned char value, std::size_t bytes, const Stream& stream);

}  // namespace ballast

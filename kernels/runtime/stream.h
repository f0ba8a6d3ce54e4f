// Streams and events: owners of the GPU's queues and of the marks in them. Nothing here waits unless its name says so.
#pragma once

#include <cstddef>
#include <memory>

#include "kernels/runtime/device.h"

namespace ballast {

class Event;

// An ordered queue of GPU work. Any thread may issue into it; what two threads issue at once has no order. Work that
// was issued is still done after the stream is gone.
class Stream {
 public:
  explicit Stream(int gpu = 0);                          // without a GPU: B2101, B2102
  static Stream wrap(StreamHandle handle, int gpu = 0);  // the caller's own, which stays the caller's

  StreamHandle handle() const { return handle_.get(); }
  int gpu() const { return gpu_; }

  void wait_for(const Event& event) const;  // later work in this stream starts after the event; the caller goes on
  bool is_done() const;
  void synchronize() const;  // the calling thread waits

 private:
  struct Destroy {
    bool owned = true;
    void operator()(StreamHandle stream) const noexcept;
  };
  Stream(StreamHandle handle, Destroy destroy, int gpu) : handle_(handle, destroy), gpu_(gpu) {}

  std::unique_ptr<CUstream_st, Destroy> handle_;
  int gpu_;
};

// A mark in a stream. Any thread may ask or wait; one thread at a time records. Done before it is first recorded.
class Event {
 public:
  enum class Timing { off, on };

  explicit Event(int gpu = 0, Timing timing = Timing::off);

  EventHandle handle() const { return handle_.get(); }

  void record(const Stream& stream) const;  // after all that was issued into the stream so far
  bool is_done() const;
  void synchronize() const;                        // the calling thread sleeps until it is done
  double seconds_since(const Event& start) const;  // both with Timing::on, and done

 private:
  struct Destroy {
    void operator()(EventHandle event) const noexcept;
  };
  std::unique_ptr<CUevent_st, Destroy> handle_;
};

// Issued into the stream, in any direction between device and host; both ends must live until it is done. Host memory
// that is not pinned makes CUDA wait in here.
void copy(void* to, const void* from, std::size_t bytes, const Stream& stream);
void fill(void* to, unsigned char value, std::size_t bytes, const Stream& stream);

}  // namespace ballast

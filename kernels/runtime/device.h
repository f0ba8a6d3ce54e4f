// All uses of CUDA by the runtime, as plain functions on handles. device_cuda.cpp implements them; in builds without
// CUDA, device_absent.cpp throws B2101. Other code uses the owners in buffer.h and stream.h. Any thread may call. Only
// choose_gpu() changes the calling thread's current device. A GPU is named by its CUDA ordinal.
#pragma once

#include <ballast/memory.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

struct CUevent_st;  // the target of CUDA's handle

namespace ballast {

using EventHandle = CUevent_st*;

struct Gpu {
  std::string name;
  std::string pci;  // "0000:3b:00.0"
  std::size_t memory_bytes = 0;
  int major = 0;  // compute capability
  int minor = 0;
};

namespace device {

std::vector<Gpu> list();    // empty if there is none
std::string absence();      // why the list is empty; empty if it is not
void require_gpu(int gpu);  // throws B2101 or B2102
void choose_gpu(int gpu);   // for all later calls of this thread that use streams and events

std::byte* allocate(std::size_t bytes, int gpu, std::string_view owner);
void release(std::byte* memory) noexcept;  // waits for the GPU's work on it
std::size_t available_bytes(int gpu);

std::string pin(std::byte* memory, std::size_t bytes, int gpu);  // returns why it is not pinned; empty on success
void unpin(std::byte* memory, int gpu) noexcept;                 // waits for all of the GPU's work

StreamHandle create_stream(int gpu, bool has_priority = false);
void destroy(StreamHandle stream) noexcept;
void synchronize(StreamHandle stream);
bool is_done(StreamHandle stream);
void wait(StreamHandle stream, EventHandle event);
void copy(void* to, const void* from, std::size_t bytes, StreamHandle stream);
void fill(void* to, unsigned char value, std::size_t bytes, StreamHandle stream);

EventHandle create_event(int gpu, bool timed);
void destroy(EventHandle event) noexcept;
void record(EventHandle event, StreamHandle stream);
void synchronize(EventHandle event);
bool is_done(EventHandle event);
double seconds_between(EventHandle start, EventHandle stop);

}  // namespace device
}  // namespace ballast

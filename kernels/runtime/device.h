// The uses of CUDA by the runtime, as plain functions. device_cuda.cpp implements them and the owners in stream.h; in builds
// without CUDA, device_absent.cpp throws B2101. Any thread may call. Only choose_gpu() changes the calling thread's current
// device. A GPU is named by its CUDA ordinal. And for direct calls of CUDA and its libraries: the current GPU of the calling
// thread, and its ranges in a profiler.
#pragma once

#include <ballast/memory.h>

#include <cstddef>
#include <new>
#include <string>
#include <string_view>
#include <vector>

namespace ballast {

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
std::string pci(int gpu);   // its PCI address; empty if there is no such GPU
void require_gpu(int gpu);  // throws B2101 or B2102
void choose_gpu(int gpu);   // applies to all later calls of this thread that use streams and events

std::byte* allocate(std::size_t bytes, int gpu, std::string_view owner);
void release(std::byte* memory) noexcept;  // waits for the GPU's work on it
std::size_t available_bytes(int gpu);

enum class Access : bool { read, write };  // what this process may do with memory
// Returns why it is not pinned; empty on success.
std::string pin(std::byte* memory, std::size_t bytes, int gpu, Access access = Access::write);
void unpin(std::byte* memory, int gpu) noexcept;  // waits for all of the GPU's work

void synchronize(StreamHandle stream);
void copy(void* to, const void* from, std::size_t bytes, StreamHandle stream);
void fill(void* to, unsigned char value, std::size_t bytes, StreamHandle stream);

}  // namespace device

// Selects a GPU while the object lives, and restores the previous one if this process uses it. CUDA makes a context when
// a GPU is selected, which takes half a gigabyte of its memory, and a new thread's current GPU is 0. Used by one thread. In
// builds without CUDA nothing is selected.
class CurrentGpu {
 public:
  explicit CurrentGpu(int gpu);
  CurrentGpu(int gpu, std::nothrow_t) noexcept;  // destructors use it: a GPU that has failed is not selected
  ~CurrentGpu();                                 // NOLINT(performance-trivially-destructible): it is not, with CUDA
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

 private:
  void select(int gpu);

  int former_ = 0;
  bool restores_ = false;
};

// A named range of the calling thread's time, which GPU profilers show together with the work that it issues. Ranges of a
// thread end in the reverse order of their beginnings. Without a profiler they cost almost nothing.
class ProfilerRange {
 public:
  explicit ProfilerRange(const std::string& name);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace ballast

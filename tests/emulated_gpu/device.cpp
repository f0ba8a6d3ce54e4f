// Replaces kernels/runtime/device_cuda.cpp.
#include "kernels/runtime/device.h"

#include <ballast/error.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "tests/emulated_gpu/calls.h"
#include "tests/emulated_gpu/memory.h"
#include "tests/emulated_gpu/streams.h"

// An event: when it was last recorded, and whether the stream has reached it.
struct CUevent_st {
  struct Record {
    std::chrono::steady_clock::time_point time{};
    ballast::offload::Promise promise{};
  };

  std::shared_ptr<Record> newest() {
    const std::lock_guard lock(mutex);
    return record;
  }

  std::mutex mutex{};
  std::shared_ptr<Record> record{};
};

namespace ballast {
namespace testing {
namespace {

struct Memory {
  std::size_t bytes = 0;
  std::byte* real = nullptr;
};

std::mutex mutex;  // guards the next two variables
std::map<const std::byte*, Memory> device_memory;
std::map<const std::byte*, std::size_t> pinned_memory;

// Returns the map's entry whose memory contains an address.
template <class Map, class Bytes>
auto around(const Map& map, const std::byte* address, const Bytes& bytes_of) {
  auto next = map.upper_bound(address);
  if (next == map.begin()) return map.end();
  --next;
  return address < next->first + bytes_of(next->second) ? next : map.end();
}

bool is_pageable(const void* address) {
  const auto* byte = static_cast<const std::byte*>(address);
  const std::lock_guard lock(mutex);
  return around(device_memory, byte, [](const Memory& memory) { return memory.bytes; }) == device_memory.end() &&
         around(pinned_memory, byte, [](std::size_t bytes) { return bytes; }) == pinned_memory.end();
}

std::byte* map(int file, std::size_t bytes, int rights) {
  void* const memory = mmap(nullptr, bytes, rights, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) fail(Code::internal, {.what = "no memory for an emulated GPU"});
  return static_cast<std::byte*>(memory);
}

}  // namespace

void* reachable(const void* address) {
  const auto* byte = static_cast<const std::byte*>(address);
  const std::lock_guard lock(mutex);
  const auto found = around(device_memory, byte, [](const Memory& memory) { return memory.bytes; });
  if (found == device_memory.end()) return const_cast<std::byte*>(byte);
  return found->second.real + (byte - found->first);
}

CUstream_st& stream_of(StreamHandle handle) {
  static CUstream_st null_stream;
  return handle != nullptr ? *handle : null_stream;
}

}  // namespace testing

namespace device {

using testing::stream_of;

std::vector<Gpu> list() { return {{.name = "emulated", .pci = "0000:00:00.0", .major = 9, .minor = 0}}; }
std::string absence() { return ""; }
void require_gpu(int gpu) {
  require(gpu == 0, Code::no_cuda_device, [] { return Problem{.what = "only GPU 0 is emulated"}; });
}
void choose_gpu(int gpu) { require_gpu(gpu); }

// Fills the memory with a pattern, because device memory is not zeroed.
std::byte* allocate(std::size_t bytes, int, std::string_view) {
  const int file = memfd_create("emulated GPU", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    fail(Code::device_memory, {.what = "no memory for an emulated GPU"});
  }
  std::byte* const real = testing::map(file, bytes, PROT_READ | PROT_WRITE);
  std::byte* const address = testing::map(file, bytes, PROT_NONE);
  close(file);
  std::memset(real, 0xa5, bytes);
  const std::lock_guard lock(testing::mutex);
  testing::device_memory[address] = {bytes, real};
  return address;
}

void release(std::byte* memory) noexcept {
  const std::lock_guard lock(testing::mutex);
  const auto found = testing::device_memory.find(memory);
  munmap(found->second.real, found->second.bytes);
  munmap(memory, found->second.bytes);
  testing::device_memory.erase(found);
}

std::size_t available_bytes(int) { return std::size_t{1} << 40; }

std::string pin(std::byte* memory, std::size_t bytes, int) {
  const std::lock_guard lock(testing::mutex);
  testing::pinned_memory[memory] = bytes;
  return "";
}

void unpin(std::byte* memory, int) noexcept {
  const std::lock_guard lock(testing::mutex);
  testing::pinned_memory.erase(memory);
}

StreamHandle create_stream(int) { return new CUstream_st; }
void destroy(StreamHandle stream) noexcept { delete stream; }
void synchronize(StreamHandle stream) { stream_of(stream).newest().wait(); }
bool is_done(StreamHandle stream) { return stream_of(stream).newest().is_done(); }

void wait(StreamHandle stream, EventHandle event) {
  if (const auto record = event->newest()) {
    stream_of(stream).add([done = record->promise.completion()] { done.wait(); });
  }
}

// Waits if either end is pageable, as CUDA does.
void copy(void* to, const void* from, std::size_t bytes, StreamHandle stream) {
  stream_of(stream).add([=] { std::memcpy(testing::reachable(to), testing::reachable(from), bytes); });
  if (testing::is_pageable(to) || testing::is_pageable(from)) synchronize(stream);
}

void fill(void* to, unsigned char value, std::size_t bytes, StreamHandle stream) {
  stream_of(stream).add([=] { std::memset(testing::reachable(to), value, bytes); });
}

EventHandle create_event(int, bool) {
  ++testing::device_calls.created_events;
  return new CUevent_st;
}
void destroy(EventHandle event) noexcept { delete event; }

void record(EventHandle event, StreamHandle stream) {
  ++testing::device_calls.recorded_events;
  auto record = std::make_shared<CUevent_st::Record>();
  {
    const std::lock_guard lock(event->mutex);
    event->record = record;
  }
  stream_of(stream).add([record = std::move(record)] {
    record->time = std::chrono::steady_clock::now();
    record->promise.finish();
  });
}

void synchronize(EventHandle event) {
  if (const auto record = event->newest()) record->promise.completion().wait();
}

bool is_done(EventHandle event) {
  const auto record = event->newest();
  return record == nullptr || record->promise.completion().is_done();
}

double seconds_between(EventHandle start, EventHandle stop) {
  ++testing::device_calls.read_times;
  for (const EventHandle event : {start, stop}) {
    require(event->newest() != nullptr && is_done(event), Code::internal,
            [] { return Problem{.what = "cannot read the time between events: they have not passed"}; });
  }
  return std::chrono::duration<double>(stop->newest()->time - start->newest()->time).count();
}

}  // namespace device
}  // namespace ballast

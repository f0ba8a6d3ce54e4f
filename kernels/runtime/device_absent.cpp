// The device of a build without CUDA: there is no GPU, and each call that needs one throws B2101.
#include <ballast/error.h>

#include <fmt/format.h>

#include "kernels/runtime/device.h"

namespace ballast {

CurrentGpu::CurrentGpu(int) {}
CurrentGpu::~CurrentGpu() = default;

ProfilerRange::ProfilerRange(const std::string&) {}
ProfilerRange::~ProfilerRange() {}

}  // namespace ballast

namespace ballast::device {

std::string absence() { return "this build has no CUDA backend"; }

namespace {

[[noreturn]] void refuse(std::string_view object) {
  fail(Code::no_cuda_build, {.what = fmt::format("cannot use {}: {}", object, absence())});
}

}  // namespace

std::vector<Gpu> list() { return {}; }
void require_gpu(int) { refuse("a GPU"); }
void choose_gpu(int) { refuse("a GPU"); }

std::byte* allocate(std::size_t, int, std::string_view) { refuse("device memory"); }
void release(std::byte*) noexcept {}
std::size_t available_bytes(int) { refuse("a GPU's free memory"); }

std::string pin(std::byte*, std::size_t, int) { return "no GPU: " + absence(); }
void unpin(std::byte*, int) noexcept {}

StreamHandle create_stream(int, bool) { refuse("a stream"); }
void destroy(StreamHandle) noexcept {}
void synchronize(StreamHandle) { refuse("a stream"); }
bool is_done(StreamHandle) { refuse("a stream"); }
void wait(StreamHandle, EventHandle) { refuse("a stream"); }
void copy(void*, const void*, std::size_t, StreamHandle) { refuse("a copy on a stream"); }
void fill(void*, unsigned char, std::size_t, StreamHandle) { refuse("a fill on a stream"); }

EventHandle create_event(int, bool) { refuse("an event"); }
void destroy(EventHandle) noexcept {}
void record(EventHandle, StreamHandle) { refuse("an event"); }
void synchronize(EventHandle) { refuse("an event"); }
bool is_done(EventHandle) { refuse("an event"); }
double seconds_between(EventHandle, EventHandle) { refuse("an event"); }

}  // namespace ballast::device

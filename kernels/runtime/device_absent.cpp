// The device of a build without CUDA: there is no GPU, and each call that needs one throws B2101.
#include <ballast/error.h>

#include <fmt/format.h>

#include "kernels/runtime/stream.h"

namespace ballast {
namespace {

[[noreturn]] void refuse(std::string_view object) {
  fail(Code::no_cuda_build, {.what = fmt::format("cannot use {}: {}", object, device::absence())});
}

}  // namespace

CurrentGpu::CurrentGpu(int) {}
CurrentGpu::~CurrentGpu() = default;

ProfilerRange::ProfilerRange(const std::string&) {}
ProfilerRange::~ProfilerRange() {}

Stream::Stream(int, Priority) : Stream(nullptr, Destroy{}, 0) { refuse("a stream"); }
void Stream::Destroy::operator()(StreamHandle) const noexcept {}
void Stream::wait_for(const Event&) const { refuse("a stream"); }
void Stream::synchronize() const { refuse("a stream"); }

Event::Event(int, Timing) { refuse("an event"); }
void Event::Destroy::operator()(EventHandle) const noexcept {}
void Event::record(const Stream&) const { refuse("an event"); }
bool Event::is_done() const { refuse("an event"); }
void Event::synchronize() const { refuse("an event"); }
double Event::seconds_since(const Event&) const { refuse("an event"); }

void copy(void*, const void*, std::size_t, const Stream&) { refuse("a copy on a stream"); }
void fill(void*, unsigned char, std::size_t, const Stream&) { refuse("a fill on a stream"); }

}  // namespace ballast

namespace ballast::device {

std::string absence() { return "this build has no CUDA backend"; }

std::vector<Gpu> list() { return {}; }
std::string pci(int) { return {}; }
void require_gpu(int) { refuse("a GPU"); }
void choose_gpu(int) { refuse("a GPU"); }

std::byte* allocate(std::size_t, int, std::string_view) { refuse("device memory"); }
void release(std::byte*) noexcept {}
std::size_t available_bytes(int) { refuse("a GPU's free memory"); }

std::string pin(std::byte*, std::size_t, int, Access) { return "no GPU: " + absence(); }
void unpin(std::byte*, int) noexcept {}

void synchronize(StreamHandle) { refuse("a stream"); }
void copy(void*, const void*, std::size_t, StreamHandle) { refuse("a copy on a stream"); }
void fill(void*, unsigned char, std::size_t, StreamHandle) { refuse("a fill on a stream"); }

}  // namespace ballast::device

#include "kernels/runtime/buffer.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <utility>
#include <vector>

#include "kernels/runtime/device.h"
#include "kernels/runtime/machine.h"

namespace ballast {

void FreeMemory::operator()(std::byte* memory) const noexcept {
  if (pinned) device::unpin(memory, gpu);
  if (allocator != nullptr) {
    allocator->release(memory, booked.bytes());
    return;
  }
  if (booked.kind() == MemoryKind::device) {
    device::release(memory);
    return;
  }
  Unmap{mapped_bytes}(memory);
}

View Buffer::view(DType dtype) const {
  require(bytes() % byte_size(dtype) == 0, Code::wrong_size, [&] {
    return Problem{.what = "cannot view a buffer: it does not hold a whole number of elements",
                   .where = owner(),
                   .needed = fmt::format("a multiple of {} bytes", byte_size(dtype)),
                   .available = fmt::format("{} bytes", bytes())};
  });
  return {data(), bytes() / byte_size(dtype), dtype};
}

Buffer Buffer::get(const BufferRequest& request, FreeMemory& free) {
  Buffer buffer;
  if (request.allocator != nullptr) {
    free.allocator = request.allocator;
    std::byte* const memory = request.bytes > 0 ? request.allocator->allocate(request.bytes) : nullptr;
    if (request.kind == MemoryKind::pinned && memory != nullptr) {
      free.unpinned_because = device::pin(memory, request.bytes, request.gpu);
      free.pinned = free.unpinned_because.empty();
    }
    buffer.memory_ = {memory, std::move(free)};
    return buffer;
  }
  if (request.kind == MemoryKind::device) {
    std::byte* const memory = request.bytes > 0 ? device::allocate(request.bytes, request.gpu, request.owner) : nullptr;
    buffer.memory_ = {memory, std::move(free)};
    return buffer;
  }
  const bool is_to_be_pinned = request.kind == MemoryKind::pinned;
  const Resident resident = is_to_be_pinned ? Resident::at_once : request.resident;  // the driver would use one thread
  const std::vector<int> cores = is_to_be_pinned ? cores_near(device::pci(request.gpu)) : std::vector<int>{};
  HostPages pages = map_host_pages(request.bytes, request.owner, resident, request.threads, cores);
  free.mapped_bytes = pages.get_deleter().bytes;
  if (is_to_be_pinned && pages) {
    free.unpinned_because = device::pin(pages.get(), free.mapped_bytes, request.gpu);
    free.pinned = free.unpinned_because.empty();
    if (!free.pinned && request.resident == Resident::when_written) clear_and_release(pages);
  }
  if (free.pinned) {
    hide_from_children(pages);
  }
  buffer.memory_ = {pages.release(), std::move(free)};
  return buffer;
}

Buffer allocate(MemoryAccounts& accounts, const BufferRequest& request) {
  FreeMemory free;
  free.booked = accounts.reserve(request.kind, request.bytes, request.owner);
  free.gpu = request.gpu;
  try {
    return Buffer::get(request, free);
  } catch (...) {
    free.booked.cancel();
    throw;
  }
}

}  // namespace ballast

#include "benchmarks/harness/buffer.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "kernels/runtime/error.h"

namespace ballast::benchmarks {
namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;

std::size_t mapped_size(std::size_t bytes) {
  return (std::max<std::size_t>(1, bytes) + huge_page - 1) / huge_page * huge_page;
}

std::byte* map(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  require(memory != MAP_FAILED, Code::host_memory, [&] {
    return Problem{.what = "no memory for the buffers of a benchmark", .needed = fmt::format("{} MiB", bytes >> 20)};
  });
  madvise(memory, bytes, MADV_HUGEPAGE);  // refused where the kernel has none: then pages are small
  return static_cast<std::byte*>(memory);
}

}  // namespace

void Buffer::Unmap::operator()(std::byte* memory) const { munmap(memory, mapped); }

Buffer::Buffer(std::size_t bytes, Threads& threads)
    : bytes_(bytes), memory_(map(mapped_size(bytes)), Unmap{mapped_size(bytes)}) {
  threads.for_slices(bytes_, huge_page,
                     [&](std::size_t first, std::size_t last) { std::memset(data() + first, 0, last - first); });
}

}  // namespace ballast::benchmarks

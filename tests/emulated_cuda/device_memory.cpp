#include "tests/emulated_cuda/device_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "tests/emulated_cuda/rules.h"

namespace emulated {
namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t gap = 4096;                       // the space between allocations: nothing is there
constexpr std::size_t reserved = std::size_t{1} << 36;  // addresses, not memory
constexpr int pattern = 0xa5;
constexpr std::size_t max_pattern_bytes = std::size_t{4} << 20;  // the rest of a large allocation is not populated

std::size_t pages(std::size_t bytes) { return (std::max<std::size_t>(bytes, 1) + page - 1) / page * page; }
std::size_t with_gap(std::size_t bytes) { return pages(bytes) + gap; }

}  // namespace

DeviceMemory::DeviceMemory(std::size_t bytes) : bytes_(bytes) {
  void* const memory = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) broken("a machine with 64 GiB of addresses", "mmap failed");
  begin_ = static_cast<std::byte*>(memory);
}

DeviceMemory::~DeviceMemory() { ::munmap(begin_, reserved); }

std::byte* DeviceMemory::allocate(std::size_t bytes) {
  std::byte* const memory = take_place(bytes);
  if (memory == nullptr) return nullptr;
  const Access access(*this);
  std::memset(memory, pattern, std::min(bytes, max_pattern_bytes));
  return memory;
}

std::byte* DeviceMemory::take_place(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes > bytes_ - used_) return nullptr;
  std::byte* at = begin_;
  for (const auto& [first, size] : allocated_) {  // the first gap that is large enough
    if (static_cast<std::size_t>(first - at) >= with_gap(bytes)) break;
    at = first + with_gap(size);
  }
  if (static_cast<std::size_t>(at - begin_) + with_gap(bytes) > reserved) return nullptr;
  allocated_[at] = bytes;
  used_ += bytes;
  if (key_.exists()) {
    key_.lock(at, pages(bytes));
  } else if (accesses_ > 0) {
    ::mprotect(at, pages(bytes), PROT_READ | PROT_WRITE);
  }
  return at;
}

bool DeviceMemory::release(std::byte* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = allocated_.find(memory);
  if (found == allocated_.end()) return false;
  ::madvise(memory, pages(found->second), MADV_DONTNEED);
  ::mprotect(memory, pages(found->second), PROT_NONE);
  used_ -= found->second;
  allocated_.erase(found);
  return true;
}

std::size_t DeviceMemory::available() {
  const std::lock_guard lock(mutex_);
  return bytes_ - used_;
}

std::size_t DeviceMemory::used() {
  const std::lock_guard lock(mutex_);
  return used_;
}

bool DeviceMemory::contains(const void* address) const {
  const auto* const byte = static_cast<const std::byte*>(address);
  return byte >= begin_ && byte < begin_ + reserved;
}

bool DeviceMemory::is_allocated(const void* address, std::size_t bytes) {
  auto* const byte = const_cast<std::byte*>(static_cast<const std::byte*>(address));
  const std::lock_guard lock(mutex_);
  auto next = allocated_.upper_bound(byte);
  if (next == allocated_.begin()) return false;
  --next;
  return byte + bytes <= next->first + next->second;
}

void DeviceMemory::open() {
  if (key_.exists()) return key_.take();
  const std::lock_guard lock(mutex_);
  if (accesses_++ == 0) protect(PROT_READ | PROT_WRITE);
}

void DeviceMemory::close() {
  if (key_.exists()) return key_.give_back();
  const std::lock_guard lock(mutex_);
  if (--accesses_ == 0) protect(PROT_NONE);
}

// The fallback without a key is one call for all allocations and the gaps between them, because kernels are many.
void DeviceMemory::protect(int rights) {
  if (allocated_.empty()) return;
  const auto& [last, bytes] = *allocated_.rbegin();
  ::mprotect(begin_, static_cast<std::size_t>(last - begin_) + pages(bytes), rights);
}

}  // namespace emulated

#include "tests/emulated_cuda/device_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/memory_order.h"
#include "tests/emulated_cuda/rules.h"

namespace emulated {
namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t gap = 4096;                       // the space between allocations: nothing is there
constexpr std::size_t reserved = std::size_t{1} << 36;  // addresses of one GPU, not memory
constexpr std::size_t all_reserved = max_gpus * reserved;
constexpr int pattern = 0xa5;
constexpr std::size_t max_pattern_bytes = std::size_t{4} << 20;  // the rest of a large allocation is not populated

std::size_t pages(std::size_t bytes) { return (std::max<std::size_t>(bytes, 1) + page - 1) / page * page; }
std::size_t with_gap(std::size_t bytes) { return pages(bytes) + gap; }

// The addresses of all GPUs, and how far behind them their work finds the same pages. Null: no GPU was used yet.
std::atomic<std::byte*> first_address = nullptr;  // written after the distance
std::ptrdiff_t distance = 0;

void reserve_addresses() {
  const int pages_of_gpus = ::memfd_create("memory of emulated GPUs", MFD_CLOEXEC);
  const auto map = [&] {
    return ::mmap(nullptr, all_reserved, PROT_NONE, MAP_SHARED | MAP_NORESERVE, pages_of_gpus, 0);
  };
  if (pages_of_gpus < 0 || ::ftruncate(pages_of_gpus, all_reserved) != 0)
    broken("a system with memfd_create()", "it failed");
  void *const of_programs = map(), *const of_work = map();
  if (of_programs == MAP_FAILED || of_work == MAP_FAILED)
    broken("a machine with a tebibyte of addresses", "mmap failed");
  ::close(pages_of_gpus);
  distance = static_cast<std::byte*>(of_work) - static_cast<std::byte*>(of_programs);
  first_address = static_cast<std::byte*>(of_programs);
}

// The caller holds the lock of the devices.
std::byte* addresses_of(int gpu) {
  if (first_address == nullptr) reserve_addresses();
  return first_address + static_cast<std::size_t>(gpu) * reserved;
}

}  // namespace

DeviceMemory::DeviceMemory(int gpu, std::size_t bytes) : bytes_(bytes), begin_(addresses_of(gpu)) {}

std::byte* DeviceMemory::allocate(std::size_t bytes) {
  std::byte* const memory = take_place(bytes);
  if (memory == nullptr) return nullptr;
  std::memset(in_work(memory), pattern, std::min(bytes, max_pattern_bytes));
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
  ::mprotect(in_work(at), pages(bytes), PROT_READ | PROT_WRITE);
  return at;
}

bool DeviceMemory::release(std::byte* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = allocated_.find(memory);
  if (found == allocated_.end()) return false;
  ::madvise(in_work(memory), pages(found->second), MADV_REMOVE);
  ::mprotect(in_work(memory), pages(found->second), PROT_NONE);
  forget_accesses(memory, found->second);
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

WorkAddresses work_addresses() {
  const auto first = reinterpret_cast<std::uintptr_t>(first_address.load());
  if (first == 0) return {};
  return {.first = first + static_cast<std::uintptr_t>(distance), .bytes = all_reserved, .known_to_programs = first};
}

void give_access(void* words, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(first_address.load());
  if (first == 0) return;
  auto* const begin = static_cast<std::byte*>(words);
  for (std::size_t at = 0; at + sizeof(std::uintptr_t) <= bytes; at += sizeof(std::uintptr_t)) {
    std::uintptr_t word = 0;
    std::memcpy(&word, begin + at, sizeof word);
    if (word - first >= all_reserved) continue;
    word += static_cast<std::uintptr_t>(distance);
    std::memcpy(begin + at, &word, sizeof word);
  }
}

}  // namespace emulated

#include "tests/emulated_cuda/memory_key.h"

#include <sys/mman.h>

#include <array>

#include "tests/emulated_cuda/rules.h"

namespace emulated {
namespace {

constexpr std::size_t max_keys = 16;
thread_local std::array<unsigned, max_keys> taken{};  // how many times, by key

}  // namespace

MemoryKey::MemoryKey() : number_(::pkey_alloc(0, PKEY_DISABLE_ACCESS)) {}

MemoryKey::~MemoryKey() {
  if (exists()) ::pkey_free(number_);
}

void MemoryKey::lock(std::byte* memory, std::size_t bytes) const {
  if (::pkey_mprotect(memory, bytes, PROT_READ | PROT_WRITE, number_) != 0)
    broken("memory with a key", "it is refused");
}

void MemoryKey::take() const {
  if (taken.at(static_cast<std::size_t>(number_))++ == 0) ::pkey_set(number_, 0);
}

void MemoryKey::give_back() const {
  if (--taken.at(static_cast<std::size_t>(number_)) == 0) ::pkey_set(number_, PKEY_DISABLE_ACCESS);
}

}  // namespace emulated

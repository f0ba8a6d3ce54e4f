#include "zero/comm/shared_pages.h"

#include <ballast/error.h>

#include <iterator>
#include <string>

#include "kernels/runtime/host_limits.h"

namespace ballast {

std::byte* SharedPages::allocate(std::size_t bytes) {
  const std::string owner = "shared memory of ranks";
  require_host_memory(bytes, owner, read_host_limits());
  SharedMemory memory = SharedMemory::make(bytes, owner);
  std::byte* const data = memory.data();
  const std::lock_guard lock(mutex_);
  memories_.emplace(data, std::move(memory));
  return data;
}

void SharedPages::release(std::byte* memory, std::size_t) noexcept {
  const std::lock_guard lock(mutex_);
  const auto released = memories_.find(memory);
  released->second.empty();  // because peers still have it mapped
  memories_.erase(released);
  ++releases_;
}

std::optional<SharedLocation> SharedPages::find(std::span<const std::byte> bytes) const {
  const std::lock_guard lock(mutex_);
  auto after = memories_.upper_bound(bytes.data());
  if (bytes.empty() || after == memories_.begin()) return std::nullopt;
  const SharedMemory& memory = std::prev(after)->second;
  const auto begin = static_cast<std::size_t>(bytes.data() - memory.data());
  if (begin + bytes.size() > memory.bytes()) return std::nullopt;
  return SharedLocation{memory.file(), releases_, begin};
}

const std::byte* PeerPages::at(const SharedLocation& location, std::size_t bytes, const SharedMemory& any_memory) {
  if (location.releases != releases_) memories_.clear();
  releases_ = location.releases;
  auto memory = memories_.find(location.file);
  if (memory == memories_.end()) {
    memory = memories_.emplace(location.file, any_memory.open_file_of_same_process(location.file, bytes)).first;
  }
  const std::size_t available = memory->second.bytes();
  require(location.begin <= available && bytes <= available - location.begin, Code::no_transport, [&] {
    return Problem{.what = "cannot read the memory of another rank: its announcement names bytes beyond the end"};
  });
  return memory->second.data() + location.begin;
}

}  // namespace ballast

// The files and pieces of memory that are registered with an io_uring, by index. Used by the ring's thread only.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

namespace ballast::offload {

template <class Key>
class RingTable {
 public:
  static constexpr std::size_t size = 256;

  int find(const Key& key) const {
    return find_if([&](const Key& known) { return known == key; });
  }
  int find_if(auto holds) const {
    const auto found = std::ranges::find_if(keys_, holds);
    return found == keys_.end() ? -1 : static_cast<int>(found - keys_.begin());
  }
  void set(int index, const Key& key) { keys_[static_cast<std::size_t>(index)] = key; }
  void clear(int index) { set(index, Key{}); }
  int free() const { return find(Key{}); }

 private:
  std::array<Key, size> keys_{};
};

struct MemoryPiece {
  static constexpr std::size_t max_bytes = std::size_t{1} << 30;  // the kernel's limit for one registration

  std::byte* data = nullptr;
  std::size_t bytes = 0;
  bool operator==(const MemoryPiece&) const = default;
  bool holds(std::span<std::byte> memory) const {
    return memory.data() >= data && memory.data() + memory.size() <= data + bytes;
  }
};

inline std::vector<MemoryPiece> pieces_of(std::span<std::byte> memory) {
  std::vector<MemoryPiece> pieces;
  for (std::size_t first = 0; first < memory.size(); first += MemoryPiece::max_bytes) {
    pieces.push_back({memory.data() + first, std::min(MemoryPiece::max_bytes, memory.size() - first)});
  }
  return pieces;
}

}  // namespace ballast::offload

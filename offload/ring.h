// Parts of a queue with an io_uring: its table of files and memory, its end, and its lines in the log.
#pragma once

#include <ballast/log.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "kernels/runtime/system_resources.h"

namespace ballast::offload {

// The files and pieces of memory that are registered with an io_uring, by index. Used by the ring's thread only.
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

bool is_ring(int descriptor);  // whether the descriptor is one of an io_uring

// The end of a ring that has been closed. The kernel ends it some time later, after its last request, and until then it may
// write to the memory of the requests. It is detected by a pipe whose write end only the ring has open: the kernel closes it
// when it ends the ring. Used by the ring's thread.
class RingEnd {
 public:
  RingEnd();  // throws B2401

  int write_end() const { return write_.get(); }  // register it with the ring
  void registered() { write_ = Descriptor(); }    // closes this process's copy

  // Waits for the end, and warns in the log from time to time: a drive may hang, or a child process that was made
  // without fork() may hold the ring.
  void wait(Log* log) const;

 private:
  Descriptor read_;
  Descriptor write_;
};

// The lines that a queue with a ring writes to the log. Without a log they are dropped.
void log_no_workers(Log* log);
void log_given_up(Log* log, const std::string& reason);
// The kernel registers memory only in sparse tables, which came with Linux 5.19.
void log_unregistered(Log* log, bool has_sparse_tables, int error, std::size_t bytes);

}  // namespace ballast::offload

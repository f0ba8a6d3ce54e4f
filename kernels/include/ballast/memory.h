// Memory: accounts of the bytes that each owner holds, the interface of an allocator, and the handle of a GPU's stream.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

struct CUstream_st;  // the target of CUDA's handle

namespace ballast {

using StreamHandle = CUstream_st*;  // a cudaStream_t

enum class MemoryKind : std::uint8_t { device, pinned, pageable };

std::string_view name(MemoryKind kind);

class MemoryAccounts;

// Bytes booked on an account for as long as this object lives. Used by one thread at a time.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept { swap(other); }
  Reservation& operator=(Reservation&& other) noexcept {
    Reservation(std::move(other)).swap(*this);
    return *this;
  }
  ~Reservation();

  void cancel() noexcept;  // undoes the booking after a failed allocation; the peak does not count it

  std::size_t bytes() const { return bytes_; }
  MemoryKind kind() const { return kind_; }
  const std::string& owner() const { return owner_; }

 private:
  friend class MemoryAccounts;
  void swap(Reservation& other) noexcept;

  MemoryAccounts* accounts_ = nullptr;
  std::string owner_;
  std::size_t bytes_ = 0;
  MemoryKind kind_ = MemoryKind::pageable;
};

// The bytes that each owner holds of each kind of memory, now and at most. It outlives its reservations. Any thread may
// call.
class MemoryAccounts {
 public:
  struct Usage {
    std::size_t now = 0;
    std::size_t peak = 0;
  };
  struct Entry {
    MemoryKind kind;
    std::string owner;
    Usage usage;
  };

  MemoryAccounts() = default;
  MemoryAccounts(const MemoryAccounts&) = delete;
  MemoryAccounts& operator=(const MemoryAccounts&) = delete;

  [[nodiscard]] Reservation reserve(MemoryKind kind, std::size_t bytes, std::string owner);

  Usage total(MemoryKind kind) const;
  Usage usage(MemoryKind kind, const std::string& owner) const;
  std::vector<Entry> entries() const;  // sorted by kind, the largest peak first; includes owners that hold nothing now

 private:
  friend class Reservation;
  struct Book {
    Usage total{};
    std::map<std::string, Usage> owners{};
  };

  void release(const Reservation& reservation) noexcept;
  void cancel(const Reservation& reservation) noexcept;
  Book& book(MemoryKind kind) { return books_[static_cast<std::size_t>(kind)]; }
  const Book& book(MemoryKind kind) const { return books_[static_cast<std::size_t>(kind)]; }

  mutable std::mutex mutex_;
  std::array<Book, 3> books_;
};

// The interface of an external allocator, such as torch's caching allocator. Any thread may call. No work uses released
// memory.
class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual std::byte* allocate(std::size_t bytes) = 0;  // aligned to 256 bytes; not necessarily zeroed
  virtual void release(std::byte* memory, std::size_t bytes) noexcept = 0;
};

}  // namespace ballast

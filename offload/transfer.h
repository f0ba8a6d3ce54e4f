// A request to a queue, and what becomes of it: every queue gives the system's answers to a Transfer, which says what to
// do next. So what counts as done, as lost and as worth another try is decided in one place, without a system call.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "offload/file.h"

namespace ballast::offload {

enum class IoKind { read, write, flush };
std::string_view name(IoKind kind);

struct IoRequest {
  IoKind kind = IoKind::read;
  const File* file = nullptr;
  std::uint64_t offset = 0;
  std::span<std::byte> memory{};  // a write only reads it; a flush has none
};

class Transfer {
 public:
  enum class Next { finished, again, failed };

  explicit Transfer(const IoRequest& request) : request_(request) {}

  // What is still to be moved.
  IoRequest rest() const;

  // The answer to rest(): bytes moved, or -errno.
  Next take(std::int64_t answer);

  // The last answer was "not now": the next try should be one that blocks, or come a little later.
  bool refused() const { return refusals_ > 0; }

  std::exception_ptr error() const;                                // once it has failed
  std::exception_ptr lost_flush(const std::string& reason) const;  // for a flush whose answer cannot come any more

 private:
  Next refuse(int error);
  Next fail(int error);

  IoRequest request_;
  std::size_t done_ = 0;
  int refusals_ = 0;  // in a row
  int error_ = 0;
};

}  // namespace ballast::offload

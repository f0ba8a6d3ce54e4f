// A request to a queue, and its progress. Every queue passes the system's answers to a Transfer, so that one place
// decides when a request has ended, has failed or is repeated. A Transfer makes no system call. Used by one thread at a
// time.
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

  // Returns the request for the bytes that remain.
  IoRequest rest() const;

  // Takes the answer to rest(): the number of bytes moved, or -errno.
  Next take(std::int64_t answer);

  // Returns whether the last answer was a refusal (EAGAIN): the next attempt should block, or be made a little later.
  bool refused() const { return refusals_ > 0; }

  std::exception_ptr error() const;                                // after Next::failed
  std::exception_ptr lost_flush(const std::string& reason) const;  // for a flush without an answer

 private:
  Next refuse(int error);
  Next fail(int error);

  IoRequest request_;
  std::size_t done_ = 0;
  int refusals_ = 0;  // in a row
  int error_ = 0;
};

}  // namespace ballast::offload

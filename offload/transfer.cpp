#include "offload/transfer.h"

#include <ballast/error.h>

#include <cerrno>
#include <exception>

namespace ballast::offload {
namespace {

constexpr int max_refusals = 100;  // in a row

}  // namespace

std::string_view name(IoKind kind) {
  constexpr std::string_view names[] = {"read", "write", "flush"};
  return names[static_cast<std::size_t>(kind)];
}

IoRequest Transfer::rest() const {
  IoRequest rest = request_;
  rest.offset += done_;
  rest.memory = rest.memory.subspan(done_);
  return rest;
}

Transfer::Next Transfer::take(std::int64_t answer) {
  if (answer == -EINTR) return Next::again;
  if (answer == -EAGAIN) return refuse(EAGAIN);
  if (answer < 0) return fail(static_cast<int>(-answer));
  if (request_.kind == IoKind::flush) return Next::finished;
  const auto moved = static_cast<std::size_t>(answer);
  if (done_ + moved == request_.memory.size()) return Next::finished;
  // After the end of a file, or if the drive is gone, every answer is 0.
  if (moved == 0) return fail(ENODATA);
  // Direct I/O continues only at a whole block.
  const std::size_t kept = request_.file->direct() ? (done_ + moved) / block_bytes * block_bytes : done_ + moved;
  if (kept == done_) return refuse(ENODATA);
  done_ = kept;
  refusals_ = 0;
  return Next::again;
}

Transfer::Next Transfer::refuse(int error) { return ++refusals_ < max_refusals ? Next::again : fail(error); }

Transfer::Next Transfer::fail(int error) {
  error_ = error;
  return Next::failed;
}

std::exception_ptr Transfer::error() const {
  try {
    fail_file(name(request_.kind), request_.file->path(), request_.offset + done_, error_);
  } catch (...) {
    return std::current_exception();
  }
}

std::exception_ptr Transfer::lost_flush(const std::string& reason) const {
  return std::make_exception_ptr(
      FailureError(Code::file_call,
                   {.what = "cannot finish a flush: its answer is lost: " + reason,
                    .where = request_.file->path().string(),
                    .remedy = "Resume from the last committed state, and find out what refuses io_uring_enter."},
                   Site::here()));
}

}  // namespace ballast::offload

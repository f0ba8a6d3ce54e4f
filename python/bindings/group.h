// A group of connected ranks, as Python holds it.
#pragma once

#include <ballast/placement.h>

#include <optional>
#include <string>
#include <vector>

#include "python/bindings/bindings.h"
#include "python/bindings/one_thread.h"
#include "python/bindings/open_groups.h"

namespace ballast::python {

struct Rendezvous {
  py::object store;
  std::optional<std::size_t> rank;
  std::optional<std::size_t> size;
  std::string host;  // of rank 0, as the others reach it
  std::string job;
  std::optional<double> timeout;  // seconds
};

// Names a sum whose values are rounded: equal on all ranks, and another one for each sum.
struct SumPlace {
  std::uint64_t step = 0;
  std::uint64_t number = 0;  // in the step
};

// A communicator. Calls that wait for other ranks let Python's other threads run. A child of fork() has no group: there
// a call is an error, and leaving does nothing.
class Group {
 public:
  explicit Group(const Rendezvous& where);
  Group(const Group&) = delete;
  // Leaves, and waits for no other rank: Python's collector may call it at any moment, on one rank long before the
  // others. While Python ends, it leaves the goodbye to the end of the process, when the exit code is known.
  ~Group();

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return size_; }
  Communicator& communicator() const;
  void barrier() const;
  std::vector<std::int64_t> all_reduce(std::vector<std::int64_t> values) const;
  // Adds fp32 in host memory over the ranks. In codes, the values are rounded by random bits of `place`.
  void sum(std::uintptr_t mine, std::uintptr_t into, std::size_t count, WireFormat format, SumPlace place) const;
  SentBytes sent() const;
  std::vector<std::string> texts(const std::string& mine) const;                      // of all ranks, of any lengths
  void broadcast(std::uintptr_t address, std::size_t bytes, std::size_t root) const;  // in host memory
  void abort(const std::string& reason) const;
  std::vector<std::size_t> failed_ranks() const;  // after leave() too
  void count_steps(std::uint64_t steps) const { open_->count_steps(steps); }

  // Says goodbye, with this reason, or with closing_words(). The communicator is freed with this object.
  void leave(const std::optional<LeaveReason>& leave_reason = {});
  void close();  // the same, and frees it; rank 0 waits until the others have left, or the timeout

 private:
  void free();

  OneThread thread_{"the group"};
  std::unique_ptr<OpenGroup> open_;
  std::size_t rank_ = 0;
  std::size_t size_ = 1;
  bool is_closed_ = false;
};

}  // namespace ballast::python

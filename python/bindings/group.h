// Ranks that have found each other, as Python holds them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/runtime/accounts.h"
#include "python/bindings/bindings.h"
#include "zero/comm/communicator.h"

namespace ballast::python {

struct Rendezvous {
  py::object store;
  std::optional<std::size_t> rank;
  std::optional<std::size_t> size;
  std::string host;  // of rank 0, as the others reach it
  std::string job;
  std::optional<double> timeout;  // seconds
};

// The communicator with what it works with. Calls that wait for other ranks let Python's other threads run.
class Group {
 public:
  explicit Group(const Rendezvous& where);
  Group(const Group&) = delete;
  ~Group();  // waits for nobody: Python's collector may call it at any moment, on one rank long before the others

  Communicator& communicator() const;
  void barrier() const;
  std::vector<std::int64_t> all_reduce(std::vector<std::int64_t> values) const;
  void sum(std::uintptr_t mine, std::uintptr_t into, std::size_t count) const;        // of fp32, over the ranks
  void broadcast(std::uintptr_t address, std::size_t bytes, std::size_t root) const;  // in host memory
  void abort(const std::string& reason) const;
  void close();

 private:
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<MemoryAccounts> accounts_;
  std::unique_ptr<Communicator> communicator_;
};

}  // namespace ballast::python
